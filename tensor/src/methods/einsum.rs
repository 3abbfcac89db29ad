//! Einsum as matrix products: reads the equation, and plans each product of two operands.

use std::collections::BTreeMap;

use crate::{Error, Result};

/// The labels of the operands and of the result of `equation`, as in "bij,bjk->bik". Without an arrow the result has the
/// labels that occur once, in alphabetical order.
///
/// Errors, naming the label, if the equation does not fit the operands' dims.
pub fn parse(equation: &str, operands: &[&[usize]]) -> Result<(Vec<Vec<char>>, Vec<char>)> {
    let refuse = |why: String| Err(Error::shape("einsum", format!("'{equation}': {why}")));
    let text: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (inputs, output) = match text.split_once("->") {
        Some((inputs, output)) => (inputs, Some(output)),
        None => (text.as_str(), None),
    };
    let labels: Vec<Vec<char>> = inputs.split(',').map(|part| part.chars().collect()).collect();
    if let Some(other) = text.chars().find(|c| !c.is_ascii_alphabetic() && !",->".contains(*c)) {
        return refuse(format!("'{other}' is no label; labels are letters"));
    }
    if labels.len() != operands.len() {
        return refuse(format!("names {} operands, got {}", labels.len(), operands.len()));
    }
    let mut sizes: BTreeMap<char, (usize, usize)> = BTreeMap::new(); // size and number of operands
    for (labels, dims) in labels.iter().zip(operands) {
        if labels.len() != dims.len() {
            let text: String = labels.iter().collect();
            return refuse(format!("'{text}' does not name the dims of {dims:?}"));
        }
        for (i, (label, &size)) in labels.iter().zip(*dims).enumerate() {
            if labels[..i].contains(label) {
                return refuse(format!(
                    "'{label}' occurs twice in one operand; diagonals are not taken"
                ));
            }
            let known = sizes.entry(*label).or_insert((size, 0));
            if known.0 != size {
                return refuse(format!("'{label}' is {} and {size}", known.0));
            }
            known.1 += 1;
        }
    }
    let output: Vec<char> = match output {
        Some(output) => output.chars().collect(),
        None => {
            sizes.iter().filter(|(_, (_, count))| *count == 1).map(|(label, _)| *label).collect()
        }
    };
    for (i, label) in output.iter().enumerate() {
        if !sizes.contains_key(label) || output[..i].contains(label) {
            return refuse(format!(
                "'{label}' of the result must occur in an operand, and once in the result"
            ));
        }
    }
    Ok((labels, output))
}

/// The dims, as [`sum`](crate::Tensor::sum) takes them, of the labels that are not in `wanted`.
pub fn others(labels: &[char], wanted: &[char]) -> Vec<isize> {
    let unwanted = labels.iter().enumerate().filter(|(_, label)| !wanted.contains(label));
    unwanted.map(|(d, _)| d as isize).collect()
}

/// The order of dims that turns `labels` into `wanted`, which has the same labels.
pub fn order(labels: &[char], wanted: &[char]) -> Vec<usize> {
    wanted.iter().filter_map(|label| labels.iter().position(|l| l == label)).collect()
}

/// A product of two operands as a batched matrix product.
pub struct Product {
    /// Labels of the left operand, as (batch, rows, summed).
    pub lhs: Vec<char>,
    /// Labels of the right operand, as (batch, summed, columns).
    pub rhs: Vec<char>,
    /// Labels of the result: batch, rows, columns.
    pub labels: Vec<char>,
    /// Dims of the result.
    pub dims: Vec<usize>,
    /// The matrices of the left operand.
    pub lhs_dims: Vec<usize>,
    /// The matrices of the right operand.
    pub rhs_dims: Vec<usize>,
    /// Whether no label is summed: the dims are then those of a broadcast product of elements.
    pub elementwise: bool,
}

impl Product {
    /// The product of operands with these labels and dims; a label that both have is summed unless it is in `wanted`.
    pub fn new(
        (lhs, lhs_dims): (&[char], &[usize]),
        (rhs, rhs_dims): (&[char], &[usize]),
        wanted: &[char],
    ) -> Product {
        let pick = |f: &dyn Fn(&char) -> bool, from: &[char]| -> Vec<char> {
            from.iter().copied().filter(|label| f(label)).collect()
        };
        let batch = pick(&|l| rhs.contains(l) && wanted.contains(l), lhs);
        let summed = pick(&|l| rhs.contains(l) && !wanted.contains(l), lhs);
        let rows = pick(&|l| !rhs.contains(l), lhs);
        let columns = pick(&|l| !lhs.contains(l), rhs);
        let size = |label: &char| match lhs.iter().position(|l| l == label) {
            Some(d) => lhs_dims[d],
            None => rhs.iter().position(|l| l == label).map_or(1, |d| rhs_dims[d]),
        };
        let sizes = |labels: &[char]| labels.iter().map(size).collect::<Vec<_>>();
        let count = |labels: &[char]| sizes(labels).iter().product::<usize>();
        let elementwise = summed.is_empty();
        let (lhs_dims, rhs_dims) = if elementwise {
            let (ones, others) = (vec![1; rows.len()], vec![1; columns.len()]);
            (
                [sizes(&batch), sizes(&rows), others].concat(),
                [sizes(&batch), ones, sizes(&columns)].concat(),
            )
        } else {
            // Without a batch the product is one of two matrices.
            let outer = if batch.is_empty() { vec![] } else { vec![count(&batch)] };
            let (m, k, n) = (count(&rows), count(&summed), count(&columns));
            ([&outer[..], &[m, k]].concat(), [&outer[..], &[k, n]].concat())
        };
        let labels = [&batch[..], &rows, &columns].concat();
        Product {
            dims: sizes(&labels),
            lhs: [&batch[..], &rows, &summed].concat(),
            rhs: [&batch[..], &summed, &columns].concat(),
            lhs_dims,
            rhs_dims,
            labels,
            elementwise,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Device, Result, Tensor};

    fn numbers(device: &Device, dims: &[usize]) -> Result<Tensor> {
        let count = dims.iter().product::<usize>();
        let values: Vec<f64> = (0..count).map(|i| ((i * i + 3 * i) % 7) as f64 - 3.0).collect();
        Tensor::from_slice(device, &values, dims)
    }

    #[test]
    fn equations_give_the_sums_that_they_name() -> Result<()> {
        let device = Device::cpu(1)?;
        let (a, b) = (numbers(&device, &[2, 3, 4])?, numbers(&device, &[2, 4, 5])?);
        assert_eq!(
            Tensor::einsum("bij,bij->jbi", &[&a, &a])?.to_f64()?,
            a.square()?.permute(&[2, 0, 1])?.to_f64()?
        );
        let product = Tensor::einsum("bij,bjk->bik", &[&a, &b])?;
        assert_eq!(product.to_f64()?, a.matmul(&b)?.to_f64()?);
        let turned = Tensor::einsum("bij, bjk -> kib", &[&a, &b])?;
        assert_eq!(turned.to_f64()?, product.permute(&[2, 1, 0])?.to_f64()?);
        let both = Tensor::einsum("bij,bjk->", &[&a, &b])?;
        assert_eq!(both.item()?, product.sum_all()?.item()?);
        // Implicit result: labels that occur once, in alphabetical order.
        assert_eq!(Tensor::einsum("bij,bjk", &[&a, &b])?.dims(), [3, 5]);
        let outer =
            Tensor::einsum("i,j->ij", &[&numbers(&device, &[2])?, &numbers(&device, &[3])?])?;
        assert_eq!(outer.to_f64()?, [9.0, -3.0, 0.0, -3.0, 1.0, 0.0]);
        let three = Tensor::einsum("bij,bjk,k->bi", &[&a, &b, &numbers(&device, &[5])?])?;
        let want = product.matmul(&numbers(&device, &[5])?.unsqueeze(1)?)?.squeeze(-1)?;
        assert_eq!(three.to_f64()?, want.to_f64()?);
        assert_eq!(Tensor::einsum("bij->jb", &[&a])?.dims(), [4, 2]);
        Ok(())
    }

    #[test]
    fn errors_name_the_label() -> Result<()> {
        let device = Device::cpu(1)?;
        let (a, b) = (numbers(&device, &[2, 3])?, numbers(&device, &[4, 2])?);
        let message = |equation| Tensor::einsum(equation, &[&a, &b]).unwrap_err().to_string();
        assert_eq!(message("ij,jk->ik"), "einsum: 'ij,jk->ik': 'j' is 3 and 4");
        assert_eq!(message("ij->j"), "einsum: 'ij->j': names 1 operands, got 2");
        assert_eq!(
            message("ijk,jk->i"),
            "einsum: 'ijk,jk->i': 'ijk' does not name the dims of [2, 3]"
        );
        assert_eq!(
            message("...j,jk->k"),
            "einsum: '...j,jk->k': '.' is no label; labels are letters"
        );
        assert!(message("ii,jk->k").contains("diagonals are not taken"));
        assert!(message("ij,kl->m").contains("'m' of the result"));
        Ok(())
    }
}
