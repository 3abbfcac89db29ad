//! Reading and adding at indices, and the error of a bad one, which comes when the host waits for the GPU.

use ferrotron_tensor::ops::argsort::SortOrder;
use ferrotron_tensor::ops::index::{gather, index_add, index_select, scatter_add};
use ferrotron_tensor::{DType, Device, ErrorKind, Result, Tensor};

use crate::support::{FLOATS, assert_like_cpu, gpu, ids, random};

const INDICES: [DType; 3] = [DType::U8, DType::U32, DType::I64];

/// Rows within one sorted run, of a pair of runs, and of more.
#[test]
fn sorting_gives_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = gpu("sorting_gives_what_the_cpu_gives")? else { return Ok(()) };
    for (dims, dim) in
        [(&[9][..], 0), (&[3, 300], 1), (&[600, 2], 0), (&[2, 1030], -1), (&[2, 0], 1)]
    {
        for order in [SortOrder::Ascending, SortOrder::Descending] {
            for dtype in FLOATS {
                let sorted = |device: &Device| random(device, dtype, dims, 1)?.sort(dim, order);
                assert_like_cpu("sort", &gpu, 0.0, |device| Ok(sorted(device)?.0))?;
                let here = sorted(&Device::cpu(1)?)?.1.to_vec::<i64>()?;
                assert_eq!(sorted(&gpu)?.1.to_vec::<i64>()?, here, "{dtype} {dims:?} {order:?}");
            }
            for dtype in INDICES {
                let places = |device: &Device| {
                    ids(device, dtype, dims, 200)?.argsort(dim, order)?.to_vec::<i64>()
                };
                assert_eq!(places(&gpu)?, places(&Device::cpu(1)?)?, "{dtype} {dims:?} {order:?}");
            }
        }
    }
    let top =
        |device: &Device| random(device, DType::F32, &[4, 700], 2)?.topk(5, 1)?.1.to_vec::<i64>();
    assert_eq!(top(&gpu)?, top(&Device::cpu(1)?)?);
    Ok(())
}

#[test]
fn indexing_gives_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = gpu("indexing_gives_what_the_cpu_gives")? else { return Ok(()) };
    for (dims, index_dims, dim) in [
        (&[9][..], &[20][..], 0_isize),
        (&[5, 7], &[4, 7], 0),
        (&[5, 7], &[5, 11], -1),
        (&[3, 4, 6], &[2, 9, 6], 1),
        (&[3, 4, 6], &[3, 0, 6], 1),
    ] {
        for (k, dtype) in FLOATS.into_iter().enumerate() {
            let kind = INDICES[k % 3];
            // Transposed in memory, both of them.
            let turned = |x: Tensor| x.transpose(0, -1)?.contiguous()?.transpose(0, -1);
            let size = dims[dim.rem_euclid(dims.len() as isize) as usize];
            assert_like_cpu("gather", &gpu, 0.0, |device| {
                let index = turned(ids(device, kind, index_dims, size)?)?;
                gather(&turned(random(device, dtype, dims, 1)?)?, dim, &index)
            })?;
            assert_like_cpu("scatter_add", &gpu, dtype.epsilon(), |device| {
                let index = turned(ids(device, kind, index_dims, size)?)?;
                let src = turned(random(device, dtype, index_dims, 2)?)?;
                scatter_add(random(device, dtype, dims, 3)?, dim, &index, &src)
            })?;
            let list = |device: &Device| {
                ids(device, kind, &[17, 2], size)?.narrow(1, 1, 1)?.reshape(&[17])
            };
            assert_like_cpu("index_select", &gpu, 0.0, |device| {
                index_select(&turned(random(device, dtype, dims, 4)?)?, dim, &list(device)?)
            })?;
            assert_like_cpu("index_add", &gpu, dtype.epsilon(), |device| {
                let x = random(device, dtype, dims, 5)?;
                let dy = index_select(&x, dim, &list(device)?)?;
                index_add(random(device, dtype, dims, 6)?, dim, &list(device)?, &dy)
            })?;
        }
    }
    Ok(())
}

#[test]
fn an_index_out_of_range_is_an_error_when_the_host_waits() -> Result<()> {
    let Some(gpu) = gpu("an_index_out_of_range_is_an_error_when_the_host_waits")? else {
        return Ok(());
    };
    let x = random(&gpu, DType::F32, &[3, 4], 1)?;
    let index = |list: &[i64], dims: &[usize]| Tensor::from_slice(&gpu, list, dims);
    let expect = |op: &str, position: usize, y: Result<Tensor>| -> Result<()> {
        let error = y?.to_vec::<f32>().unwrap_err();
        let want =
            format!("{op}: the index at position {position} in row-major order is out of range");
        assert_eq!((error.kind(), error.to_string()), (ErrorKind::Value, want));
        // It is said once.
        x.to_vec::<f32>().map(drop)
    };
    let bad = index(&[0, 1, 2, 3, 4, -1], &[3, 2])?;
    expect("gather", 4, gather(&x, 1, &bad))?;
    expect("gather", 2, gather(&x, 1, &bad.transpose(0, 1)?))?;
    let src = random(&gpu, DType::F32, &[3, 2], 2)?;
    expect("scatter_add", 4, scatter_add(x.clone(), 1, &bad, &src))?;
    let src = random(&gpu, DType::F32, &[2, 3], 2)?;
    expect(
        "scatter_add",
        1,
        scatter_add(x.clone(), 0, &index(&[0, 3, 1, 1, 3, 0], &[2, 3])?, &src),
    )?;
    expect("index_select", 1, index_select(&x, 0, &index(&[2, 3, -7], &[3])?))?;
    expect(
        "index_add",
        2,
        index_add(Tensor::zeros(&gpu, DType::F32, &[7, 4])?, 0, &index(&[2, 0, 7], &[3])?, &x),
    )?;
    let nothing = Tensor::zeros(&gpu, DType::F32, &[3, 0])?;
    assert_eq!(gather(&nothing, 1, &bad).unwrap_err().kind(), ErrorKind::Value);
    Ok(())
}
