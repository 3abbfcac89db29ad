//! Clients of `ferrotron serve` that leave, or that take nothing, and requests that are too large.

use super::serve::Server;
use super::{folder_with_text, succeeded, train};
use serde_json::{Value, json};

/// Far more completions than can be made in the time of a test: 51,200 of `max_tokens`, whose prompts alone are more
/// bytes of events than the buffers of a connection take.
fn large(more: Value) -> Vec<u8> {
    let mut request = json!({ "prompt": vec![[1, 2, 3]; 400], "max_tokens": 20, "n": 128 });
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request.to_string().into_bytes()
}

/// The server has no answer to give to a client that takes none.
#[test]
fn a_client_that_reads_nothing_does_not_keep_the_server_from_ending() {
    let server = Server::start("");
    let request = large(json!({ "stream": true, "echo": true }));
    let stream = server.open("POST", "/v1/completions", &request);
    // Its first bytes are there: the request is being answered.
    stream.peek(&mut [0; 1]).unwrap();
    assert_eq!(server.stop(), Some(0));
    drop(stream);
}

/// Of what they asked for, so much is computed as until the server notices that they are gone: a small part.
#[test]
fn clients_that_have_left_hold_nobody_up() {
    for layout in ["", "--nproc 2 --tensor-model-parallel-size 2"] {
        let server = Server::start(layout);
        for more in [json!({}), json!({ "stream": true })] {
            drop(server.open("POST", "/v1/completions", &large(more)));
        }
        server.complete(&json!({ "prompt": [1, 2], "max_tokens": 5, "temperature": 0 }));
        let (asked_for, added) = (2 * 400 * 128 * 20, server.added_tokens());
        assert!((4..asked_for / 100).contains(&added), "{added} of {asked_for} tokens {layout}");
        assert_eq!(server.stop(), Some(0));
    }
}

#[test]
fn a_long_prompt_is_not_copied_without_bound() {
    let folder = folder_with_text();
    let options = "--save run --train-iters 1 --position-embedding-type rope --max-position-embeddings 200000";
    succeeded(train(folder.path(), &options.split(' ').collect::<Vec<_>>()));
    let server = Server::load(&folder.path().join("run"), "");
    let request = json!({ "prompt": vec![1; 150_000], "max_tokens": 1, "n": 128 });
    let (status, message) = server.refused(&request.to_string());
    let wanted = "150000 tokens with n 128 are more than 16777216: lower n";
    assert!(status == 400 && message == wanted, "{status} {message}");
    server.complete(&json!({ "prompt": [1, 2], "max_tokens": 2, "n": 128 }));
    assert_eq!(server.stop(), Some(0));
}
