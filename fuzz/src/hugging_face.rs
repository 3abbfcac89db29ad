//! Hugging Face folders: `config.json`, and `model.safetensors` of a small GPT-2.

use crate::folder::{path, write};
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_models::hugging_face::{self, bert};
use ferrotron_nn::Scope;
use ferrotron_tensor::{DType, Device, Result};

/// The models of the seeds: a family each.
fn configs() -> Vec<GptConfig> {
    vec![GptConfig::gpt2(11, 1, 4, 2, 6), GptConfig::llama(11, 1, 8, 2, 1, 6)]
}

/// A file of an exported model.
fn exported(config: &GptConfig, file: &str) -> Vec<u8> {
    let scope = Scope::new(&device(), DType::F32, 1);
    let gpt = Gpt::new(&scope, config).expect("the model is small");
    hugging_face::export(&gpt, &path("exported")).expect("a family holds it");
    std::fs::read(path("exported").join(file)).expect("it was written")
}

fn device() -> Device {
    Device::cpu(1).expect("a thread")
}

pub fn config_seeds() -> Vec<Vec<u8>> {
    configs().iter().map(|config| exported(config, "config.json")).collect()
}

pub fn read_config(bytes: &[u8]) -> bool {
    let folder = path("config");
    std::fs::create_dir_all(&folder).expect("a folder");
    write(&folder.join("config.json"), bytes);
    let found = [
        hugging_face::model_kind(&folder).is_ok(),
        hugging_face::model_type(&folder).is_ok(),
        hugging_face::read_config(&folder).is_ok(),
        bert::read_config(&folder).is_ok(),
    ];
    found[2] || found[3]
}

pub fn weights_seeds() -> Vec<Vec<u8>> {
    vec![exported(&configs()[0], "model.safetensors")]
}

pub fn read_weights(bytes: &[u8]) -> bool {
    let folder = path("weights");
    if !folder.exists() {
        std::fs::create_dir_all(&folder).expect("a folder");
        write(&folder.join("config.json"), &config_seeds()[0]);
    }
    write(&folder.join("model.safetensors"), bytes);
    let read = || -> Result<Gpt> {
        hugging_face::stored_dtypes(&folder)?;
        hugging_face::import(&folder, &device(), DType::F32)
    };
    read().is_ok()
}
