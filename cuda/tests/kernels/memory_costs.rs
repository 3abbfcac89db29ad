//! Runs all tests of operations with a check of every access: none races with another one, and what they cost is a table in
//! the repository. Costs are sectors of global memory (coalescing) and wavefronts of shared memory (bank conflicts).

use ferrotron_cuda::kernels::{ElementType, KernelSource};
use ferrotron_cuda_sim::available;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::ops::costs;
use crate::simulator::Costs;

/// Set to write the table anew.
const UPDATE: &str = "UPDATE_MEMORY_COSTS";

/// The most sectors and wavefronts, over the least for as many different bytes, of kernels that are not listed.
const MOST: [f64; 3] = [2.0, 2.0, 1.0];

/// The share by which numbers may differ from the table's: biases of attention lie at any multiple of 16 bytes, so their sectors vary.
const ROOM: f64 = 0.02;

/// Kernels that cost more, by file or by file and name, with the reason.
const COSTLY: &[(&str, &str)] = &[
    ("argsort/", "places follow from the values"),
    ("attention/attention_backward_keys", BESIDE),
    ("attention_bias/attention_backward_bias", "fragments are stored an element at a time"),
    ("attention_bias/attention_backward_keys", BESIDE),
    (
        "attention_bias/attention_backward_queries",
        "adjacent biases, which lie anywhere, are loaded singly",
    ),
    ("attention_rows/attention_rows", "a lane reads a row of its own; for checks and small models"),
    ("attention_warpgroup/attention_backward_keys", BESIDE),
    ("copy/select", "the largest launch has transposed operands"),
    ("round/", "a thread has four adjacent elements, which share a draw"),
    ("zero_bitmap/zero_pack", "what a warp keeps begins at any element"),
];

/// The reason for bank conflicts that take 1 % of the wavefronts.
const BESIDE: &str = "lse, delta and keys of a query lie side by side, and are stored singly";

#[test]
fn no_kernel_has_a_race_and_accesses_cost_what_the_table_says() {
    if !available("no_kernel_has_a_race_and_accesses_cost_what_the_table_says") {
        return;
    }
    let all = costs();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kernels/memory_costs.txt");
    let made = table(&all);
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let costly = |(name, costs): &(&String, &Costs)| {
        let more = ratios(costs).into_iter().zip(MOST).any(|(ratio, most)| ratio > Some(most));
        more && !COSTLY.iter().any(|(known, _)| name.starts_with(known))
    };
    let costly: Vec<_> = all.iter().filter(costly).collect();
    assert!(costly.is_empty(), "these take many sectors or wavefronts: {costly:#?}");
    let kept = std::fs::read_to_string(&path).unwrap();
    if kept.lines().next() != made.lines().next() {
        return println!("the table of costs is another compiler's, and not compared");
    }
    let agrees = |(kept, made): &(&str, &str)| {
        let mut words = kept.split_whitespace().zip(made.split_whitespace());
        words.all(|(kept, made)| {
            let numbers = (kept.parse::<f64>(), made.parse::<f64>());
            kept == made
                || matches!(numbers, (Ok(kept), Ok(made)) if (kept - made).abs() <= ROOM * kept)
        })
    };
    let changed: Vec<_> = kept.lines().zip(made.lines()).filter(|lines| !agrees(lines)).collect();
    assert!(
        changed.is_empty() && kept.lines().count() == made.lines().count(),
        "the costs of accesses have changed; {UPDATE}=1 writes {} anew: {changed:#?}",
        path.display()
    );
}

/// The ratio of the count to the least; nothing where nothing is accessed.
fn ratios(costs: &Costs) -> [Option<f64>; 3] {
    [costs.load_sectors, costs.store_sectors, costs.wavefronts]
        .map(|[counted, least]| (least > 0).then(|| counted as f64 / least as f64))
}

fn table(all: &BTreeMap<String, Costs>) -> String {
    let version = Command::new("g++").arg("-dumpversion").output().unwrap().stdout;
    let mut out = format!(
        "g++ {}, bf16 (f32, f64 or i64 for kernels without it)\n\n\
         Sectors of 32 bytes of loads and of stores of global memory, and wavefronts of shared memory, over the least for as\n\
         many different bytes: in the first of a kernel's largest launches in the tests.\n\n",
        String::from_utf8_lossy(&version).trim()
    );
    for (name, costs) in all {
        let (kernel, element) = name.rsplit_once('_').unwrap();
        let file = KernelSource::named(kernel.split('/').next().unwrap()).unwrap();
        let best = [ElementType::BF16, ElementType::F32].into_iter();
        let shown = best.into_iter().find(|one| file.types.contains(one)).unwrap_or(file.types[0]);
        if element == shown.name() {
            let column =
                |ratio: Option<f64>| ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"));
            let [loads, stores, wavefronts] = ratios(costs).map(column);
            out.push_str(&format!("{kernel:56} {loads:>5} {stores:>5} {wavefronts:>5}\n"));
        }
    }
    out
}
