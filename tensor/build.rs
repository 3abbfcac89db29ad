//! Records the level of optimisation that the kernels are compiled with.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let level = std::env::var("OPT_LEVEL").expect("cargo sets it");
    println!("cargo::rustc-env=FERROTRON_OPT_LEVEL={level}");
}
