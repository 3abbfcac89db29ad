//! The presets against published numbers.

use super::*;

#[test]
fn sizes_are_those_published() {
    // Billions of parameters as rounded in the papers; for PTD-P equation (2) of arXiv 2104.04473, whose tables
    // use a vocabulary of 51200.
    let published = [
        ("gpt2-124m", 0.124),
        ("gpt2-350m", 0.355),
        ("gpt2-774m", 0.774),
        ("gpt2-1.5b", 1.558),
        ("megatron-1.2b", 1.2),
        ("megatron-2.5b", 2.5),
        ("megatron-4.2b", 4.2),
        ("megatron-8.3b", 8.3),
        ("ptd-1.7b", 1.7),
        ("ptd-3.6b", 3.6),
        ("ptd-7.5b", 7.5),
        ("ptd-18.4b", 18.4),
        ("ptd-39.1b", 39.1),
        ("ptd-76.1b", 76.1),
        ("ptd-145.6b", 145.6),
        ("ptd-310.1b", 310.1),
        ("ptd-529.6b", 529.6),
        ("ptd-1t", 1008.0),
        ("gemma2-2b", 2.614),
        ("gemma2-9b", 9.242),
        ("gemma2-27b", 27.227),
    ];
    for (preset, (name, billions)) in PRESETS.iter().zip(published) {
        let config = preset.config();
        config.validate().unwrap();
        assert_eq!(preset.name, name);
        let count = config.num_parameters() as f64 / 1e9;
        assert!(
            (count / billions - 1.0).abs() < 0.03,
            "{name}: {count} billion, published {billions}"
        );
    }
    assert_eq!(Preset::find("gpt2-124m").unwrap().config().num_parameters(), 124_439_808);
}

#[test]
fn an_unknown_name_lists_the_known_ones() {
    let error = Preset::find("gpt3").unwrap_err().to_string();
    assert!(
        error.starts_with("preset: there is no 'gpt3'; the presets are gpt2-124m, "),
        "{error}"
    );
}

/// The fields of `config.json` on Hugging Face that no count of parameters shows: rotary base, norm epsilon, longest
/// positions, tied embeddings, window, nonlinearity. Of Qwen 3 it is the file of the chat models; the longest positions of
/// Pythia 14M and 31M are those of training.
#[test]
fn fields_are_those_of_config_json() {
    const SWIGLU: ActivationKind = ActivationKind::Swiglu;
    const GEGLU: ActivationKind = ActivationKind::Geglu;
    const ERF: ActivationKind = ActivationKind::GeluErf;
    const TANH: ActivationKind = ActivationKind::GeluTanh;
    let published = [
        ("gemma2-2b", 1e4, 1e-6, 8192, true, Some(4096), GEGLU),
        ("gemma2-9b", 1e4, 1e-6, 8192, true, Some(4096), GEGLU),
        ("gemma2-27b", 1e4, 1e-6, 8192, true, Some(4096), GEGLU),
        ("llama2-7b", 1e4, 1e-5, 4096, false, None, SWIGLU),
        ("llama2-13b", 1e4, 1e-5, 4096, false, None, SWIGLU),
        ("llama2-70b", 1e4, 1e-5, 4096, false, None, SWIGLU),
        ("llama3-8b", 5e5, 1e-5, 8192, false, None, SWIGLU),
        ("llama3-70b", 5e5, 1e-5, 8192, false, None, SWIGLU),
        ("llama3.1-8b", 5e5, 1e-5, 131_072, false, None, SWIGLU),
        ("llama3.1-70b", 5e5, 1e-5, 131_072, false, None, SWIGLU),
        ("llama3.1-405b", 5e5, 1e-5, 131_072, false, None, SWIGLU),
        ("llama3.2-1b", 5e5, 1e-5, 131_072, true, None, SWIGLU),
        ("llama3.2-3b", 5e5, 1e-5, 131_072, true, None, SWIGLU),
        ("tinyllama-1.1b", 1e4, 1e-5, 2048, false, None, SWIGLU),
        ("mistral-7b", 1e4, 1e-5, 32_768, false, Some(4096), SWIGLU),
        ("mistral-7b-v0.3", 1e6, 1e-5, 32_768, false, None, SWIGLU),
        ("qwen2-0.5b", 1e6, 1e-6, 131_072, true, None, SWIGLU),
        ("qwen2-1.5b", 1e6, 1e-6, 131_072, true, None, SWIGLU),
        ("qwen2-7b", 1e6, 1e-6, 131_072, false, None, SWIGLU),
        ("qwen2-72b", 1e6, 1e-5, 131_072, false, None, SWIGLU),
        ("qwen2.5-0.5b", 1e6, 1e-6, 32_768, true, None, SWIGLU),
        ("qwen2.5-1.5b", 1e6, 1e-6, 131_072, true, None, SWIGLU),
        ("qwen2.5-3b", 1e6, 1e-6, 32_768, true, None, SWIGLU),
        ("qwen2.5-7b", 1e6, 1e-6, 131_072, false, None, SWIGLU),
        ("qwen2.5-14b", 1e6, 1e-5, 131_072, false, None, SWIGLU),
        ("qwen2.5-32b", 1e6, 1e-5, 131_072, false, None, SWIGLU),
        ("qwen2.5-72b", 1e6, 1e-5, 131_072, false, None, SWIGLU),
        ("qwen3-0.6b", 1e6, 1e-6, 40_960, true, None, SWIGLU),
        ("qwen3-1.7b", 1e6, 1e-6, 40_960, true, None, SWIGLU),
        ("qwen3-4b", 1e6, 1e-6, 40_960, true, None, SWIGLU),
        ("qwen3-8b", 1e6, 1e-6, 40_960, false, None, SWIGLU),
        ("qwen3-14b", 1e6, 1e-6, 40_960, false, None, SWIGLU),
        ("qwen3-32b", 1e6, 1e-6, 40_960, false, None, SWIGLU),
        ("smollm-135m", 1e4, 1e-5, 2048, true, None, SWIGLU),
        ("smollm-360m", 1e4, 1e-5, 2048, true, None, SWIGLU),
        ("smollm-1.7b", 1e4, 1e-5, 2048, true, None, SWIGLU),
        ("smollm2-135m", 1e5, 1e-5, 8192, true, None, SWIGLU),
        ("smollm2-360m", 1e5, 1e-5, 8192, true, None, SWIGLU),
        ("smollm2-1.7b", 1.3e5, 1e-5, 8192, true, None, SWIGLU),
        ("pythia-14m", 1e4, 1e-5, 2048, false, None, ERF),
        ("pythia-31m", 1e4, 1e-5, 2048, false, None, ERF),
        ("pythia-70m", 1e4, 1e-5, 2048, false, None, ERF),
        ("pythia-160m", 1e4, 1e-5, 2048, false, None, ERF),
        ("pythia-410m", 1e4, 1e-5, 2048, false, None, ERF),
        ("pythia-1b", 1e4, 1e-5, 2048, false, None, ERF),
        ("pythia-1.4b", 1e4, 1e-5, 2048, false, None, ERF),
        ("pythia-2.8b", 1e4, 1e-5, 2048, false, None, ERF),
        ("pythia-6.9b", 1e4, 1e-5, 2048, false, None, ERF),
        ("pythia-12b", 1e4, 1e-5, 2048, false, None, ERF),
        ("gpt-neox-20b", 1e4, 1e-5, 2048, false, None, TANH),
    ];
    let found = |preset: &Preset| {
        let config = preset.config();
        (
            preset.name,
            config.rotary_base,
            config.norm_epsilon,
            config.max_position_embeddings,
            config.tie_embeddings,
            config.window_size,
            config.activation,
        )
    };
    let (of_gpt2, others): (Vec<&Preset>, Vec<&Preset>) =
        PRESETS.iter().partition(|preset| preset.family == PresetFamily::Gpt2);
    assert_eq!(others.len(), published.len());
    for (preset, wanted) in others.into_iter().zip(published) {
        assert_eq!(found(preset), wanted);
    }
    // Learned positions of the training length.
    for preset in of_gpt2 {
        let wanted = (preset.name, 1e4, 1e-5, preset.seq_length, true, None, TANH);
        assert_eq!(found(preset), wanted);
    }
}
