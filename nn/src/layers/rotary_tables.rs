//! The rotary tables of a model: computed once for a run, on the device, and shared by its layers.

use ferrotron_tensor::ops::rotary::RotaryTable;
use ferrotron_tensor::{DType, Device, Result};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::RopeScaling;

/// The tables that layers of one [`Scope`](crate::Scope) have asked for.
#[derive(Clone, Default)]
pub(crate) struct RotaryTables(Arc<Mutex<Vec<(Angles, RotaryTable)>>>);

/// The values from which a table is computed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Angles {
    pub device: Device,
    pub dtype: DType,
    /// Rotated elements of a head.
    pub dim: usize,
    pub base: f64,
    pub scaling: Option<RopeScaling>,
    /// Runs (start, length) of the positions.
    pub positions: Vec<(usize, usize)>,
}

impl Angles {
    /// Whether both have the same angle at each position.
    fn agree(&self, other: &Angles) -> bool {
        Angles { positions: Vec::new(), ..self.clone() }
            == Angles { positions: Vec::new(), ..other.clone() }
    }
}

impl RotaryTables {
    /// The table of `wanted`. If its positions are one run, it is a part of a table of all positions below `longest`; a
    /// longer table replaces a shorter one. The table of other positions, of a rank of context parallelism, replaces that
    /// of the positions before.
    ///
    /// While work of the device is captured, a new table belongs to the graph and is not kept.
    pub fn get(&self, wanted: &Angles, longest: usize) -> Result<RotaryTable> {
        let mut tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |angles: &Angles| angles.agree(wanted);
        if let &[(start, len)] = &wanted.positions[..] {
            let whole = |angles: &Angles| match angles.positions[..] {
                [(0, known)] if same(angles) => Some(known),
                _ => None,
            };
            let known = tables.iter().find(|(angles, _)| whole(angles) >= Some(start + len));
            if let Some((_, table)) = known {
                return table.narrow(start, len);
            }
            let all = Angles { positions: vec![(0, longest.max(start + len))], ..wanted.clone() };
            let table = all.table()?;
            if wanted.device.expect_no_capture("rotary_table").is_ok() {
                tables.retain(|(angles, _)| whole(angles).is_none());
                tables.push((all, table.clone()));
            }
            return table.narrow(start, len);
        }
        if let Some((_, table)) = tables.iter().find(|(angles, _)| angles == wanted) {
            return Ok(table.clone());
        }
        let table = wanted.table()?;
        if wanted.device.expect_no_capture("rotary_table").is_ok() {
            tables.retain(|(angles, _)| !same(angles) || angles.positions.len() == 1);
            tables.push((wanted.clone(), table.clone()));
        }
        Ok(table)
    }
}

impl Angles {
    fn table(&self) -> Result<RotaryTable> {
        let positions = self.positions.iter().flat_map(|&(start, len)| start..start + len);
        let mut frequencies = RotaryTable::frequencies(self.dim, self.base)?;
        if let Some(scaling) = &self.scaling {
            frequencies.iter_mut().for_each(|frequency| *frequency = scaling.scaled(*frequency));
        }
        RotaryTable::with_frequencies(&self.device, self.dtype, positions, &frequencies)
    }
}

impl fmt::Debug for RotaryTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        write!(f, "RotaryTables({})", tables.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_tensor::Category;

    #[test]
    fn one_table_serves_all_that_agree() -> Result<()> {
        let device = Device::cpu(1)?;
        let tables = RotaryTables::default();
        let bytes = || device.memory().bytes(Category::Tables);
        let wanted = |base, positions: &[(usize, usize)]| Angles {
            device: device.clone(),
            dtype: DType::F32,
            dim: 8,
            base,
            scaling: None,
            positions: positions.to_vec(),
        };
        let row = 8 * 4; // cosines and sines of four angles
        for _layer in 0..3 {
            tables.get(&wanted(100.0, &[(0, 16)]), 16)?;
            tables.get(&wanted(100.0, &[(5, 1)]), 16)?; // generation
        }
        assert_eq!(bytes(), 16 * row);
        let part = tables.get(&wanted(100.0, &[(5, 4)]), 16)?;
        let want = RotaryTable::new(&device, DType::F32, 5..9, 8, 100.0)?;
        for (got, want) in part.tensors().into_iter().zip(want.tensors()) {
            assert_eq!(got.to_f64()?, want.to_f64()?);
        }
        drop((part, want));
        // Longer sequences replace the table; another base, and pieces of sequences, have their own.
        tables.get(&wanted(100.0, &[(0, 20)]), 20)?;
        assert_eq!(bytes(), 20 * row);
        tables.get(&wanted(10.0, &[(0, 4)]), 4)?;
        for _layer in 0..3 {
            tables.get(&wanted(100.0, &[(0, 2), (6, 2)]), 8)?;
        }
        assert_eq!(bytes(), (20 + 4 + 4) * row);
        // Pieces of longer and of shorter sequences replace them: sequences of many lengths leave one table.
        for chunk in [3, 4, 1] {
            tables.get(&wanted(100.0, &[(0, chunk), (3 * chunk, chunk)]), 4 * chunk)?;
            assert_eq!(bytes(), (20 + 4 + 2 * chunk) * row);
        }
        drop(tables);
        assert_eq!(bytes(), 0);
        Ok(())
    }
}
