//! The place of one of our parameters in Hugging Face's format, both ways.

use ferrotron_tensor::{Result, Tensor};

/// The order of a weight's elements there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The same layout.
    Same,
    /// (in, out), where ours is (out, in).
    Transposed,
    /// Rows of queries, keys and values follow one another within each of these heads, where ours are all queries, all
    /// keys, all values.
    ByHead(usize),
}

/// The tensors there that make one of our parameters.
#[derive(Debug, Clone)]
pub(super) struct Mapping {
    /// Their names with the rows of each; they follow one another along the first dim of ours.
    pub parts: Vec<(String, usize)>,
    pub form: Form,
}

impl Mapping {
    /// One tensor of `rows` rows, as here.
    pub fn same(name: String, rows: usize) -> Mapping {
        Mapping { parts: vec![(name, rows)], form: Form::Same }
    }

    /// The dims there of a part of `rows` rows of a parameter of `dims`.
    pub fn dims(&self, rows: usize, dims: &[usize]) -> Vec<usize> {
        let rest = &dims[1..];
        match self.form {
            Form::Transposed => rest.iter().copied().chain([rows]).collect(),
            Form::Same | Form::ByHead(_) => {
                [rows].into_iter().chain(rest.iter().copied()).collect()
            }
        }
    }

    /// The part with a number of a parameter, as it is stored there.
    pub fn part(&self, value: &Tensor, number: usize) -> Result<Tensor> {
        let start = self.parts[..number].iter().map(|(_, rows)| rows).sum();
        to_theirs(self.form, &value.narrow(0, start, self.parts[number].1)?)
    }

    /// A part as it is here.
    pub fn to_ours(&self, theirs: &Tensor) -> Result<Tensor> {
        match self.form {
            Form::Same => Ok(theirs.clone()),
            Form::Transposed => theirs.transpose(0, 1),
            Form::ByHead(heads) => by_head(theirs, [heads, 3]),
        }
    }
}

fn to_theirs(form: Form, ours: &Tensor) -> Result<Tensor> {
    match form {
        Form::Same => Ok(ours.clone()),
        Form::Transposed => ours.transpose(0, 1),
        Form::ByHead(heads) => by_head(ours, [3, heads]),
    }
}

/// Swaps the two leading dims of (a, b, rows, ..), which are one in `x`.
fn by_head(x: &Tensor, [a, b]: [usize; 2]) -> Result<Tensor> {
    let dims = x.dims();
    let split: Vec<usize> =
        [a, b, dims[0] / (a * b)].into_iter().chain(dims[1..].iter().copied()).collect();
    x.contiguous()?.reshape(&split)?.transpose(0, 1)?.contiguous()?.reshape(dims)
}
