//! Options of the program in a TOML file, from the file to the memory of the run that they describe.

use ferrotron_fuzz::Target;
use ferrotron_fuzz::folder::{path, write};

pub const TARGET: Target = Target { name: "options", seeds, read };

/// A default run, one with most kinds of values, and a large one in a layout of many ranks.
const FILES: [&str; 3] = [
    "",
    r#"
        # A run.
        data = ["README.md", 'LICENSE-MIT']
        tokenizer = "char"
        lr = 1e-3
        swiglu = true
        rampup_batch_size = [12, 12, 100]
        global-batch-size = 24
        split = "969, 30, 1"
        recompute-granularity = "selective"
        recompute_modules = ["attn", "mlp"]
    "#,
    r#"
        preset = "gpt2-124m"
        bf16 = true
        nproc = 16
        tensor_model_parallel_size = 2
        pipeline_model_parallel_size = 2
        sequence_parallel = true
        zero_stage = 1
        micro_batch_size = 1
        global_batch_size = 32
        optimizer = "adam"
        clip_grad = 0.0
        json = true
    "#,
];

fn seeds() -> Vec<Vec<u8>> {
    FILES.map(|file| file.as_bytes().to_vec()).into()
}

fn read(bytes: &[u8]) -> bool {
    let file = path("run.toml");
    write(&file, bytes);
    let words = ["ferrotron".as_ref(), "memory".as_ref(), "--config".as_ref(), file.as_os_str()];
    crate::cli::run(words.map(Into::into).into()).is_ok()
}
