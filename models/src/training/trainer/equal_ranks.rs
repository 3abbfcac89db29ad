//! Compares the configurations of all ranks before they train together: they would train a mixture of models, or wait for
//! one another.

use ferrotron_nn::Scope;
use ferrotron_parallel::agreement::{Facts, agree};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::Result;
use serde_json::Value;
use std::fmt::Debug;

use super::TrainerConfig;
use crate::io::checkpoint::SavedModel;
use crate::training::model::Model;

/// Errors, with the same line on all ranks of `mesh`, if they have other configurations. Sends 32 bytes to each rank, and
/// nothing on a fake device.
pub(super) fn check_configs<M: Model>(
    scope: &Scope,
    mesh: &Mesh,
    model: &M::Config,
    config: &TrainerConfig,
) -> Result<()> {
    if scope.device().is_fake() || mesh.world().size() == 1 {
        return Ok(());
    }
    let mut facts = facts(scope, config);
    let told = fields_of_model::<M>(model).map(|fields| facts.extend(fields));
    let agreed = agree(mesh.world(), told.as_ref().map(|_| &facts));
    told?;
    agreed
}

/// Every field of a configuration, by its name.
fn facts(scope: &Scope, config: &TrainerConfig) -> Facts {
    let TrainerConfig {
        seed,
        optimizer,
        frozen,
        keep_in_fp32,
        ema_decay,
        schedule,
        schedule_unit,
        clip_grad,
        batch_size,
        parallel,
        precision,
        bad_steps,
        execution,
        saves,
    } = config;
    let dtype = scope.dtype();
    let fields: [(&str, &dyn Debug); 15] = [
        ("dtype", &dtype),
        ("seed", seed),
        ("optimizer", optimizer),
        ("frozen", frozen),
        ("keep_in_fp32", keep_in_fp32),
        ("ema_decay", ema_decay),
        ("schedule", schedule),
        ("schedule_unit", schedule_unit),
        ("clip_grad", clip_grad),
        ("batch_size", batch_size),
        ("parallel", parallel),
        ("precision", precision),
        ("bad_steps", bad_steps),
        ("execution", execution),
        ("saves", saves),
    ];
    fields.map(|(name, value)| (format!("TrainerConfig::{name}"), format!("{value:?}"))).into()
}

/// Every field of a model's configuration, by its name.
fn fields_of_model<M: Model>(model: &M::Config) -> Result<Facts> {
    let SavedModel { architecture, config } = SavedModel::new(M::ARCHITECTURE, model)?;
    let named = |(name, value): (String, Value)| (format!("the model's {name}"), value.to_string());
    let fields: Facts = match config {
        Value::Object(fields) => fields.into_iter().map(named).collect(),
        other => [named(("configuration".to_string(), other))].into(),
    };
    Ok([("the architecture".to_string(), architecture)].into_iter().chain(fields).collect())
}
