//! `ferrotron report`: what stands in the page, and what is refused. A browser opens one in `.ci/run`.

use super::{ferrotron, folder_with_text, succeeded, train};
use std::path::Path;

fn refused(folder: &Path, arguments: &[&str]) -> String {
    let output = ferrotron(folder, &[&["report"], arguments].concat());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
    assert_eq!(message.lines().count(), 1, "{arguments:?}: {message}");
    message
}

#[test]
fn a_page_has_the_curves_results_and_options_of_its_runs() {
    let folder = folder_with_text();
    let path = folder.path();
    let markup = "<script>alert('&')<";
    succeeded(train(path, &["--save", markup]));
    let pipeline = ["--nproc", "2", "--pipeline-model-parallel-size", "2", "--num-layers", "2"];
    let other = ["--save", "other", "--lr", "0.003", "--global-batch-size", "8"];
    succeeded(train(path, &[&other[..], &pipeline].concat()));
    std::fs::copy(path.join("other/metrics.jsonl"), path.join("copy.jsonl")).unwrap();
    let eval = succeeded(ferrotron(path, &["eval", "--load", markup, "--json"]));
    std::fs::write(path.join("eval.json"), eval).unwrap();

    let words = ["report", markup, "other", "copy.jsonl", "other", "--eval", "eval.json"];
    assert_eq!(succeeded(ferrotron(path, &words)), "report.html\n");
    let page = std::fs::read_to_string(path.join("report.html")).unwrap();
    for part in [
        "&lt;script&gt;alert(&#39;&amp;&#39;)&lt;</td>",
        "\"\\u003cscript>alert('&')\\u003c\"",
        "other (2)",
        "<b>Training loss</b>",
        "<b>Validation loss</b>",
        "<b>Peak memory</b>",
        "Training loss by tokens",
        "<code>--lr</code></td><td>default</td><td>0.003</td><td>–</td><td>0.003</td>",
        "<code>--pipeline-model-parallel-size</code>",
        "<b>1f1b, 2 stages, 4 micro-batches: bubble 25 % of the ideal time</b>",
        "<summary>Options in common</summary>",
        "<h2>Evaluations</h2>",
        "<td>eval.json</td>",
        "The options of copy.jsonl are not known",
    ] {
        assert!(page.contains(part), "{part} is missing");
    }
    assert!(!page.contains("<script>alert"), "a name became markup");
    // The names of SVG's elements are no address that is fetched.
    let addresses = page.replace("http://www.w3.org/2000/svg", "");
    assert!(!addresses.contains("http:") && !addresses.contains("https:"));

    // A page replaces a page.
    assert_eq!(succeeded(ferrotron(path, &["report", "other"])), "report.html\n");
    let one = std::fs::read_to_string(path.join("report.html")).unwrap();
    assert!(one.len() < page.len() && one.ends_with("</html>\n"));
    assert!(one.contains("<summary>Options</summary>") && !one.contains("Options that differ"));
}

#[test]
fn what_is_no_run_or_no_page_is_refused_and_left() {
    let folder = folder_with_text();
    let path = folder.path();
    assert!(refused(path, &[]).contains("there is no run with a file of metrics in runs/"));
    assert!(refused(path, &["absent"]).contains("there is no absent: name the folder of a run"));
    std::fs::create_dir(path.join("empty")).unwrap();
    assert!(refused(path, &["empty"]).contains("there is no empty/metrics.jsonl"));
    assert!(refused(path, &["text.txt"]).contains("text.txt, line 1, is no line"));
    std::fs::write(path.join("none.jsonl"), "").unwrap();
    assert!(refused(path, &["none.jsonl"]).contains("none.jsonl has no steps yet"));
    std::fs::write(
        path.join("one.jsonl"),
        "{\"step\":1,\"loss\":null,\"lr\":0.1,\"grad_norm\":null,\"tokens\":8}\n{\"step\":2,",
    )
    .unwrap();
    let output = refused(path, &["one.jsonl", "--output", "text.txt"]);
    assert!(output.contains("text.txt holds something else than a report"), "{output}");
    let eval = refused(path, &["one.jsonl", "--eval", "text.txt"]);
    assert!(eval.contains("--eval: text.txt is no JSON object"), "{eval}");
    // A run that has just begun has a page.
    succeeded(ferrotron(path, &["report", "one.jsonl"]));
}
