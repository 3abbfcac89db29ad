//! Tests of exclusive writes to flat buffers, and of tensors that outlive an update.

use super::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn ranges_are_written_in_place_and_lie_end_to_end() -> Result<()> {
    let device = Device::cpu(1)?;
    let parts =
        [("a".to_string(), vec![2]), ("empty".to_string(), vec![0]), ("b".to_string(), vec![1, 3])];
    let mut flat = FlatBuffer::new(&device, DType::F64, Category::Gradients, &parts)?;
    assert_eq!(device.memory().bytes(Category::Gradients), 40);
    let pointer = flat.host_bytes_mut()?.as_ptr();
    flat.with_mut(2, |b| {
        b.as_mut_slice::<f64>()?.copy_from_slice(&[1.0, 2.0, 3.0]);
        Ok(())
    })?;
    assert_eq!(flat.host_bytes_mut()?.as_ptr(), pointer);
    assert_eq!(flat.slice(..)?.to_vec::<f64>()?, [0.0, 0.0, 1.0, 2.0, 3.0]);
    assert_eq!((flat.range(0)?, flat.range(1)?, flat.range(2)?), ((0, 2), (2, 0), (2, 3)));
    for error in [flat.name(3).err(), flat.range(3).err()] {
        assert!(error.unwrap().to_string().contains("asked for range 3 of 3"));
    }
    assert_eq!(device.memory().current, 40);
    let held = flat.tensor(0)?;
    assert!(
        flat.with_mut(0, |_| Ok(())).unwrap_err().to_string().contains("'a' cannot be written")
    );
    drop(held);
    assert!(flat.check_writable().is_ok());
    Ok(())
}

fn two(device: &Device) -> Result<FlatBuffer> {
    let parts = [("a".to_string(), vec![2]), ("b".to_string(), vec![3])];
    FlatBuffer::new(device, DType::F32, Category::Weights, &parts)
}

#[test]
fn a_panic_in_an_update_empties_the_flat() -> Result<()> {
    let device = Device::cpu(1)?;
    let mut flat = two(&device)?;
    let update = || flat.with_mut(0, |_| -> Result<()> { panic!("on purpose") });
    assert!(catch_unwind(AssertUnwindSafe(update)).is_err());
    assert_eq!((flat.len(), flat.numel()), (0, 0));
    assert!(flat.slice(..)?.numel() == 0 && flat.host_bytes_mut()?.is_empty());
    assert_eq!(device.memory().current, 0);
    let mut flat = two(&device)?;
    let update = || flat.with_slice_mut(1..4, |_| -> Result<()> { panic!("on purpose") });
    assert!(catch_unwind(AssertUnwindSafe(update)).is_err());
    assert_eq!((flat.len(), flat.numel()), (0, 0));
    assert_eq!(device.memory().current, 0);
    Ok(())
}

#[test]
fn a_replaced_range_empties_the_flat() -> Result<()> {
    let device = Device::cpu(1)?;
    let mut flat = two(&device)?;
    let error = flat.with_mut(1, |tensor| {
        // The original tensor is dropped first, so that the allocator may reuse its address.
        *tensor = Tensor::zeros(&device, DType::F32, &[1])?;
        *tensor = Tensor::zeros(&device, DType::F32, &[3])?;
        Ok(())
    });
    assert!(error.unwrap_err().to_string().contains("replaced instead of written"));
    assert_eq!(flat.len(), 0);
    let mut flat = two(&device)?;
    let error = flat.with_slice_mut(.., |tensor| {
        *tensor = Tensor::zeros(&device, DType::F32, &[5])?;
        Ok(())
    });
    assert!(error.unwrap_err().to_string().contains("replaced instead of written"));
    assert_eq!((flat.len(), device.memory().current), (0, 0));
    let huge = [("a".to_string(), vec![1 << 59]), ("b".to_string(), vec![1 << 59])];
    assert!(FlatBuffer::new(&device, DType::F64, Category::Weights, &huge).is_err());
    Ok(())
}
fn one(x: &mut Tensor) -> Result<()> {
    x.as_mut_slice::<f32>()?.fill(1.0);
    Ok(())
}

#[test]
fn whoever_reads_elements_keeps_their_ranges_from_being_written() -> Result<()> {
    let device = Device::cpu(1)?;
    let mut flat = two(&device)?;
    let (current, first) = (device.memory().current, flat.slice(..1)?);
    let message = |result: Result<()>| result.unwrap_err().to_string();
    assert!(message(flat.with_slice_mut(1..3, one)).contains("'a' cannot be written"));
    assert!(message(flat.with_mut(0, one)).contains("'a' cannot be written"));
    assert_eq!(device.memory().current, current);
    flat.with_slice_mut(2.., one)?;
    flat.with_mut(1, one)?;
    drop(first);
    flat.with_slice_mut(.., one)?;
    let parts = (flat.tensor(0)?, flat.slice(1..4)?, flat.slice(3..)?);
    // None of them may be written while another tensor reads the same range, whether or not the flat buffer still
    // exists.
    drop(flat);
    let (mut a, mut middle, end) = parts;
    assert!(!a.is_unique() && !middle.is_unique() && !end.is_unique());
    assert!(a.as_mut_slice::<f32>().is_err() && middle.as_mut_slice::<f32>().is_err());
    drop((a, end));
    assert!(middle.is_unique() && middle.as_mut_slice::<f32>().is_ok());
    assert_eq!(device.memory().current, current);
    drop(middle);
    assert_eq!(device.memory().current, 0);
    Ok(())
}

#[test]
fn a_copy_that_leaves_an_update_keeps_the_flat_from_being_written() -> Result<()> {
    let device = Device::cpu(1)?;
    let mut flat = two(&device)?;
    let mut kept = flat.with_slice_mut(1..3, |x| {
        one(x)?;
        Ok(x.clone())
    })?;
    assert!(!kept.is_unique() && kept.as_mut_slice::<f32>().is_err());
    for range in [0, 1] {
        assert!(flat.with_mut(range, one).is_err());
    }
    assert!(flat.with_slice_mut(4.., one).is_err() && flat.check_writable().is_err());
    assert_eq!(flat.slice(..)?.to_vec::<f32>()?, [0.0, 1.0, 1.0, 0.0, 0.0]);
    drop(kept);
    flat.with_slice_mut(4.., one)
}

#[test]
fn elements_of_any_ranges_are_found_and_lent() -> Result<()> {
    let device = Device::cpu(1)?;
    let parts = [0, 2, 0, 0, 3, 1, 0].map(|len| (format!("{len}"), vec![len]));
    let mut flat = FlatBuffer::new(&device, DType::F32, Category::Weights, &parts)?;
    let mut want = vec![0.0; 6];
    for (start, end) in (0..=6).flat_map(|end| (0..=end).map(move |start| (start, end))) {
        let value = (10 * start + end) as f32;
        want[start..end].fill(value);
        // Other ranges may be read meanwhile.
        let elsewhere = |(first, len): (usize, usize)| first + len <= start || end <= first;
        let others = (0..parts.len()).filter(|&range| elsewhere(flat.range(range).unwrap()));
        let others = others.map(|range| flat.tensor(range)).collect::<Result<Vec<_>>>()?;
        flat.with_slice_mut(start..end, |x| {
            x.as_mut_slice::<f32>()?.fill(value);
            Ok(())
        })?;
        drop(others);
        assert_eq!(flat.slice(..)?.to_vec::<f32>()?, want, "{start}..{end}");
        assert_eq!(flat.slice(start..end)?.to_vec::<f32>()?, want[start..end]);
        for (range, (name, dims)) in parts.iter().enumerate() {
            assert_eq!((flat.name(range)?, flat.tensor(range)?.dims()), (&name[..], &dims[..]));
        }
    }
    Ok(())
}

#[test]
fn elements_that_are_not_there_are_an_error() -> Result<()> {
    let device = Device::cpu(1)?;
    let mut flat = two(&device)?;
    assert_eq!((flat.slice(2..2)?.numel(), flat.slice(5..)?.numel()), (0, 0));
    #[allow(clippy::reversed_empty_ranges)]
    for range in [2..6, 6..6, 4..2] {
        assert!(flat.slice(range.clone()).is_err(), "{range:?}");
        assert!(flat.with_slice_mut(range.clone(), one).is_err(), "{range:?}");
    }
    assert!(flat.slice(..=usize::MAX).is_err());
    assert_eq!(flat.len(), 2);
    flat.with_slice_mut(3..3, |x| x.zero_fill())
}
