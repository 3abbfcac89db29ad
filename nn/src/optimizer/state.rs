//! The state that a rule declares.

use ferrotron_tensor::DType;

/// A state that a rule declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSpec {
    /// The name, unique within a rule: `exp_avg`, say.
    pub name: &'static str,
    /// The shape, which decides how it is sharded: as the weights are, without the dim that it lacks.
    pub shape: StateShape,
    /// The dtype; `None` is the accumulator dtype of the weights: f32, or f64.
    pub dtype: Option<DType>,
}

impl StateSpec {
    /// A state of one number per element, in the accumulator dtype.
    pub const fn per_element(name: &'static str) -> StateSpec {
        StateSpec { name, shape: StateShape::PerElement, dtype: None }
    }

    /// A state of one number per row, in the accumulator dtype.
    pub const fn per_row(name: &'static str) -> StateSpec {
        StateSpec { name, shape: StateShape::PerRow, dtype: None }
    }

    /// A state of one number per column, in the accumulator dtype.
    pub const fn per_column(name: &'static str) -> StateSpec {
        StateSpec { name, shape: StateShape::PerColumn, dtype: None }
    }

    /// The same state in another dtype.
    ///
    /// ```
    /// use ferrotron_nn::StateSpec;
    /// use ferrotron_tensor::DType;
    /// assert_eq!(StateSpec::per_element("momentum").with_dtype(DType::BF16).dtype, Some(DType::BF16));
    /// ```
    #[must_use]
    pub const fn with_dtype(self, dtype: DType) -> StateSpec {
        StateSpec { dtype: Some(dtype), ..self }
    }
}

/// The shape of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateShape {
    /// A number for each weight.
    PerElement,
    /// A number for each row: the dims without the last one.
    PerRow,
    /// A number for each column: the dims without the last but one.
    PerColumn,
}
