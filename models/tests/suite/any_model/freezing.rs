//! Frozen parameters of a model that the crate does not know: in every layout, resumed, and refused.

use ferrotron_models::checkpoint::Checkpoint;
use ferrotron_models::trainer::Trainer;
use ferrotron_nn::Scope;
use ferrotron_tensor::{DType, Device, Result};

use super::{ALONE, CONFIG, LAYOUTS, Layout, Mlp, STEPS, close};

/// Layers 0 and 1 are the whole first stage of two.
const FROZEN: [&[&str]; 4] = [&["layers.0", "layers.1"], &["head"], &["*.bias"], &["*", "!head"]];

#[test]
fn frozen_parameters_stay_in_every_layout_and_after_resuming() {
    let folder = tempfile::tempdir().unwrap();
    let trained = ALONE.train(None, STEPS, None);
    for (i, frozen) in FROZEN.into_iter().enumerate() {
        let want = Layout { frozen, ..ALONE }.train(None, STEPS, None);
        assert!(want[1][0] != trained[1][0], "{want:?}");
        for (layout, next) in LAYOUTS.iter().zip(LAYOUTS.iter().cycle().skip(2)) {
            let [layout, next] = [layout, next].map(|layout| Layout { frozen, ..*layout });
            close(&layout.train(None, STEPS, None), &want, &layout);
            let run = folder.path().join(format!("{i}-{}-{}", layout.data, layout.pipeline));
            layout.train(None, 2, Some(&run));
            close(&next.train(Some(&run), STEPS - 2, None), &want[2..], &(layout, next));
        }
    }
}

/// More may be frozen when a run resumes; what has no moments cannot thaw.
#[test]
fn a_resumed_run_may_freeze_more_but_not_thaw() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let run = |frozen| Layout { frozen, ..ALONE };
    let want = run(&["head"]).train(None, 2, Some(folder.path()));
    let more = run(&["head", "layers.0"]).train(Some(folder.path()), 2, None);
    assert!(more[0][0] < want[0][0]);
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
    let mut trainer = Trainer::<Mlp>::new(&scope, &CONFIG, ALONE.config()?)?;
    let error = trainer.load(&Checkpoint::open(folder.path())?).unwrap_err().to_string();
    assert!(error.contains(" of 'head.weight', which was frozen when it was saved"), "{error}");
    Ok(())
}

#[test]
fn patterns_that_freeze_nothing_or_all_are_refused() -> Result<()> {
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
    for (frozen, shown) in [
        (&["laiers.0"][..], "'laiers.0' matches none of 9 parameters"),
        (&["*"], "all 9 parameters are frozen: nothing is left to train"),
    ] {
        let config = Layout { frozen, ..ALONE }.config()?;
        let error = Trainer::<Mlp>::new(&scope, &CONFIG, config).err().expect("an error");
        assert!(error.to_string().starts_with(&format!("freeze-parameters: {shown}")), "{error}");
    }
    Ok(())
}
