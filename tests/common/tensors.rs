//! Global tensors, put together from what ranks hold of them.

use ferrotron::tensor::ShardSpec;
use std::collections::BTreeMap;

/// Global tensors by name.
pub type Tensors = BTreeMap<String, Vec<f64>>;

/// A part of a global tensor.
pub type Part = (String, ShardSpec, Vec<f64>);

/// The global tensors, assembled from the ranks' parts: every element once.
pub fn assemble(parts: Vec<Part>) -> Tensors {
    let mut whole: BTreeMap<String, Vec<Option<f64>>> = BTreeMap::new();
    for (name, place, values) in parts {
        let numel = place.global_dims().iter().product();
        let target = whole.entry(name.clone()).or_insert_with(|| vec![None; numel]);
        for (index, value) in indices(&place).zip(values) {
            let old = target[index].replace(value);
            assert!(old.is_none(), "element {index} of {name} is held twice");
        }
    }
    let complete = |(name, values): (String, Vec<Option<f64>>)| {
        let missing = values.iter().position(Option::is_none);
        assert_eq!(missing, None, "nobody holds this element of {name}");
        (name, values.into_iter().flatten().collect())
    };
    whole.into_iter().map(complete).collect()
}

/// The global indices of a part's elements, in local order.
pub fn indices(place: &ShardSpec) -> impl Iterator<Item = usize> + '_ {
    let width = place.dims().last().copied().unwrap_or(1);
    let numel: usize = place.dims().iter().product();
    let runs = (0..numel.checked_div(width).unwrap_or(0)).flat_map(|row| place.runs(row));
    runs.flat_map(|(start, len)| start as usize..start as usize + len)
}
