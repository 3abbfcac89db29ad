//! Dropout with a mask that is a function of seed, step, position in the model, number of the call, and position in the
//! global batch.

use ferrotron_autograd::Var;
use ferrotron_tensor::{At, Error, Result};

use crate::{Context, Mode, Module, RandomSite, Scope};

/// Zeros activations with probability `p` while training: Srivastava et al. (2014).
#[derive(Debug, Clone, Module)]
pub struct Dropout {
    path: String,
    /// `None` with a probability of 0.
    #[module(skip)]
    site: Option<RandomSite>,
    p: f64,
}

impl Dropout {
    /// Creates the layer at `scope`.
    ///
    /// Errors unless `p` is in \[0, 1\], and, if `p` is not 0, if another layer draws random numbers at this path.
    pub fn new(scope: &Scope, p: f64) -> Result<Dropout> {
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::config(
                "dropout",
                format!("the probability must be in [0, 1], got {p}"),
            )
            .at(scope.path()));
        }
        let site = (p > 0.0).then(|| scope.random_site()).transpose()?;
        Ok(Dropout { path: scope.path().to_string(), site, p })
    }

    /// (batch, sequence, features..) -> the same dims. Kept elements are divided by 1 - p. The identity unless
    /// training. Each call in a pass draws a mask of its own.
    ///
    /// Errors if batch or sequence differ from `ctx`.
    pub fn forward(&self, ctx: &Context, x: &Var) -> Result<Var> {
        let Some(site) = self.site(ctx) else { return Ok(x.clone()) };
        let Some(features) = x.dims().get(2..) else {
            let message = format!("needs (batch, sequence, ..), got {:?}", x.dims());
            return Err(Error::shape("dropout", message).at(&self.path));
        };
        let place = ctx.shard_spec(features).at(&self.path)?;
        x.dropout(self.p, &ctx.next_key(site.path()), &place).at(&self.path)
    }

    /// Returns whether [`Dropout::forward`] returns its operand: with a probability of 0, and unless training.
    pub fn is_identity(&self, ctx: &Context) -> bool {
        self.site(ctx).is_none()
    }

    fn site(&self, ctx: &Context) -> Option<&RandomSite> {
        self.site.as_ref().filter(|_| ctx.mode == Mode::Train)
    }

    /// The probability.
    pub fn p(&self) -> f64 {
        self.p
    }

    /// The global path, which is the random site of the mask.
    pub fn path(&self) -> &str {
        &self.path
    }
}
