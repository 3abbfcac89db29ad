//! The memory formulas of arXiv 2205.05198 give the numbers of its figures 1 and 7.

mod korthikanti;

use korthikanti::{MODELS, Saving};

#[test]
fn formulas_give_the_published_bytes() {
    for model in &MODELS {
        let close = |got: f64, want: f64, of: &str| {
            // Figure 7 has 9.42 % for full recomputation of the two largest models, where table 2 gives 9.52 %.
            let differs = of == "Full" && matches!(model.name, "530B" | "1T");
            let most = if differs { 0.012 } else { 0.01 };
            assert!((got / want - 1.0).abs() <= most, "{}, {of}: {got} {want}", model.name);
        };
        let [states, none, both] = model.figure_1;
        close(model.states(), states, "parameters and optimizer");
        close(model.activations(Saving::Tensor), none, "activations");
        close(model.activations(Saving::Both), both, "activations, both");
        let whole = model.layer_bytes(Saving::Tensor);
        let forms = [Saving::Sequence, Saving::Selective, Saving::Both, Saving::Full];
        for (saving, percent) in forms.into_iter().zip(model.figure_7) {
            close(100.0 * model.layer_bytes(saving) / whole, percent, &format!("{saving:?}"));
        }
    }
}
