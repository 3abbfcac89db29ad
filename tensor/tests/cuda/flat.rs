//! Flats in memory of a GPU: rights to write elements, without a slice of them.

use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::{Category, DType, ErrorKind, FlatBuffer, MemoryKind, Result, Tensor};

use crate::support::gpu;

#[test]
fn elements_are_read_and_written_over_any_ranges() -> Result<()> {
    let Some(device) = gpu("elements_are_read_and_written_over_any_ranges")? else {
        return Ok(());
    };
    let parts = [("a".to_string(), vec![2]), ("b".to_string(), vec![2, 2]), ("c".into(), vec![1])];
    for kind in [MemoryKind::Device, MemoryKind::Host] {
        let mut flat = FlatBuffer::new_in(kind, &device, DType::F32, Category::Weights, &parts)?;
        assert_eq!(flat.slice(..)?.to_vec::<f32>()?, [0.0; 7]);
        let numbers = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0, 4.0, 5.0], &[5])?;
        flat.with_slice_mut(1..6, |x| x.copy_from(&numbers))?;
        flat.with_mut(1, |b| {
            let rest = Tensor::full(&device, DType::F32, &[2, 2], 10.0)?;
            add_assign(b, &rest)
        })?;
        assert_eq!(flat.tensor(1)?.to_vec::<f32>()?, [12.0, 13.0, 14.0, 15.0]);
        let all = flat.slice(..)?;
        assert_eq!(all.memory_kind(), kind);
        assert_eq!(all.to_vec::<f32>()?, [0.0, 1.0, 12.0, 13.0, 14.0, 15.0, 0.0]);
        let error = flat.with_slice_mut(..1, Tensor::zero_fill).unwrap_err().to_string();
        assert!(error.contains("'a' cannot be written while 1 other tensors read it"), "{error}");
        drop(all);
        let kept = flat.with_slice_mut(5.., |x| Ok(x.clone()))?;
        assert!(!kept.is_unique());
        assert!(flat.with_mut(2, Tensor::zero_fill).is_err());
        flat.with_mut(0, Tensor::zero_fill)?;
        drop(kept);
        flat.with_slice_mut(.., Tensor::zero_fill)?;
        assert_eq!(flat.host_bytes_mut().unwrap_err().kind(), ErrorKind::Device);
    }
    Ok(())
}

#[test]
fn runs_that_overlap_are_refused_everywhere() -> Result<()> {
    let Some(device) = gpu("runs_that_overlap_are_refused_everywhere")? else { return Ok(()) };
    let parts = [("a".to_string(), vec![7])];
    for kind in [MemoryKind::Device, MemoryKind::Host] {
        let mut flat = FlatBuffer::new_in(kind, &device, DType::F32, Category::Weights, &parts)?;
        let mut add = |runs: &[std::ops::Range<usize>]| {
            FlatBuffer::for_each_chunk_mut(&mut [&mut flat], runs, |index, tensors| {
                let more =
                    Tensor::full(&device, DType::F32, tensors[0].dims(), index as f64 + 1.0)?;
                add_assign(tensors[0], &more)
            })
        };
        let error = add(&[0..4, 3..7]).unwrap_err().to_string();
        assert_eq!(error, "flat: run 3..7 begins before the end of 0..4");
        assert!(add(&[4..7, 0..4]).is_err());
        add(&[0..3, 3..4, 5..7])?;
        assert_eq!(flat.slice(..)?.to_vec::<f32>()?, [1.0, 1.0, 1.0, 2.0, 0.0, 3.0, 3.0]);
    }
    Ok(())
}
