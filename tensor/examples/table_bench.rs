//! Times the table ops on 1 and 2 threads, best of 7: `cargo run --release -p ferrotron-tensor --example table_bench`.
use ferrotron_tensor::ops::{
    adamw::*, cast::*, cross_entropy::*, dropout::*, embedding::*, random::*, reduce::*,
    softmax::*, sq_norm::*,
};
use ferrotron_tensor::*;
use std::time::Instant;
fn time(name: &str, bytes: f64, elements: f64, mut f: impl FnMut()) {
    f();
    let mut best = f64::INFINITY;
    for _ in 0..7 {
        let t = Instant::now();
        f();
        best = best.min(t.elapsed().as_secs_f64());
    }
    println!(
        "{name:40} {:9.3} ms {:8.1} GB/s {:9.1} M/s",
        best * 1e3,
        bytes / best / 1e9,
        elements / best / 1e6
    );
}
fn main() -> Result<()> {
    for threads in [1, 2] {
        println!("--- {threads} threads");
        let d = Device::cpu(threads)?;
        let key = RandomKey::new(1, 2, "x");
        let n = 124_000_000;
        {
            let (mut w, g, mut m, mut v) =
                (vec![1.0f32; n], vec![1e-3f32; n], vec![0.1f32; n], vec![0.1f32; n]);
            time("adamw 124M", 28.0 * n as f64, n as f64, || {
                adamw(&d, &AdamW::default(), &mut w, &g, &mut m, &mut v).unwrap()
            });
            time("sq_norm 124M", 4.0 * n as f64, n as f64, || {
                std::hint::black_box(sq_norm(&d, &w));
            });
            time("all_finite 124M", 4.0 * n as f64, n as f64, || {
                assert!(all_finite(&d, &w));
            });
            let (wc, mc) = (w.chunks_mut(n / threads), m.chunks(n / threads));
            let pairs: std::sync::Mutex<Vec<_>> = std::sync::Mutex::new(wc.zip(mc).collect());
            time("memcpy 124M (read+write)", 8.0 * n as f64, n as f64, || {
                let mut p = pairs.lock().unwrap();
                std::thread::scope(|s| {
                    for (w, m) in p.iter_mut() {
                        s.spawn(|| w.copy_from_slice(m));
                    }
                });
            });
        }
        let (rows, v) = (1024, 50304);
        let e = (rows * v) as f64;
        let x = normal(&d, DType::F32, &Place::whole(&[rows, v]), &key, 0.0, 1.0)?;
        let t: Vec<i64> = (0..rows as i64).map(|i| i * 37 % v as i64).collect();
        let t = Tensor::from_slice(&d, &t, &[rows])?;
        let cfg = CrossEntropyConfig::default();
        let mut lse = None;
        time("cross_entropy 1024x50304", 4.0 * e, e, || {
            lse = Some(cross_entropy(&x, &t, &cfg).unwrap().lse)
        });
        let lse = lse.unwrap();
        let mut own = Some(x.copy()?);
        time("cross_entropy_backward in place", 8.0 * e, e, || {
            own = Some(cross_entropy_backward(own.take().unwrap(), &t, &lse, &cfg, 1.0).unwrap())
        });
        time("cross_entropy_backward new", 8.0 * e, e, || {
            drop(cross_entropy_backward(x.clone(), &t, &lse, &cfg, 1.0).unwrap())
        });
        time("softmax 1024x50304", 8.0 * e, e, || drop(softmax(&x, -1).unwrap()));
        let y = softmax(&x, -1)?;
        time("softmax_backward", 12.0 * e, e, || {
            drop(softmax_backward(&y, x.clone(), -1).unwrap())
        });
        drop(y);
        let b = cast(&x, DType::BF16)?;
        time("cast f32->bf16", 6.0 * e, e, || drop(cast(&x, DType::BF16).unwrap()));
        time("cast bf16->f32", 6.0 * e, e, || drop(cast(&b, DType::F32).unwrap()));
        time("cast f32->f16", 6.0 * e, e, || drop(cast(&x, DType::F16).unwrap()));
        time("cross_entropy bf16", 2.0 * e, e, || drop(cross_entropy(&b, &t, &cfg).unwrap().lse));
        time("sum_to (1024,50304)->(50304)", 4.0 * e, e, || drop(sum_to(&x, &[v]).unwrap()));
        time("sum rows", 4.0 * e, e, || drop(sum(&x, &[1], KeepDims::Drop).unwrap()));
        time("lse rows", 4.0 * e, e, || drop(log_sum_exp(&x, &[1], KeepDims::Drop).unwrap()));
        time("argmax rows", 4.0 * e, e, || drop(argmax(&x, 1, KeepDims::Drop).unwrap()));
        let p = Place::whole(&[rows, v]);
        time("normal", 4.0 * e, e, || drop(normal(&d, DType::F32, &p, &key, 0.0, 1.0).unwrap()));
        time("uniform", 4.0 * e, e, || drop(uniform(&d, DType::F32, &p, &key, 0.0, 1.0).unwrap()));
        time("dropout", 8.0 * e, e, || drop(dropout(&x, 0.1, &key, &p).unwrap()));
        drop(x);
        let x = normal(&d, DType::F32, &Place::whole(&[1024, 3072]), &key, 0.0, 1.0)?;
        let e = 1024.0 * 3072.0;
        time("bias grad 1024x3072", 4.0 * e, e, || drop(sum_to(&x, &[3072]).unwrap()));
        let x = normal(&d, DType::F32, &Place::whole(&[1024, 768]), &key, 0.0, 1.0)?;
        let w = normal(&d, DType::F32, &Place::whole(&[v, 768]), &key, 0.0, 1.0)?;
        let e = 1024.0 * 768.0;
        time("bias grad 1024x768", 4.0 * e, e, || drop(sum_to(&x, &[768]).unwrap()));
        time("softmax 1024x768", 8.0 * e, e, || drop(softmax(&x, -1).unwrap()));
        time("embedding 1024 of 50304x768", 8.0 * e, e, || drop(embedding(&w, &t).unwrap()));
        let mut dw = w.copy()?;
        time("embedding_backward", 12.0 * e, e, || embedding_backward(&x, &t, &mut dw).unwrap());
        for bound in [usize::MAX, 1 << 26] {
            use ferrotron_tensor::ops::{linear_cross_entropy::*, matmul::Accum};
            let mut grad = Tensor::zeros(&d, DType::F32, &[v, 768])?;
            let flops = 6.0 * e * v as f64;
            time(&format!("linear_cross_entropy fwd+bwd {bound} (G/s = flop)"), flops, e, || {
                let f = linear_cross_entropy(&x, &w, &t, &cfg, bound).unwrap();
                let g = Gradients {
                    scale: 1.0,
                    input: InputGradient::Wanted,
                    weight: Some((&mut grad, Accum::Add)),
                };
                drop(linear_cross_entropy_backward(f.kept, &x, &w, &t, &f.lse, &cfg, g).unwrap());
            });
        }
        // The shapes of a character model.
        let x = normal(&d, DType::F32, &Place::whole(&[768, 65]), &key, 0.0, 1.0)?;
        let t: Vec<i64> = (0..768).map(|i| i * 37 % 65).collect();
        let t = Tensor::from_slice(&d, &t, &[768])?;
        let e = 768.0 * 65.0;
        time("cross_entropy 768x65", 4.0 * e, e, || drop(cross_entropy(&x, &t, &cfg).unwrap()));
        let lse = cross_entropy(&x, &t, &cfg)?.lse;
        let mut own = Some(x.copy()?);
        time("cross_entropy_backward 768x65", 8.0 * e, e, || {
            own = Some(cross_entropy_backward(own.take().unwrap(), &t, &lse, &cfg, 1.0).unwrap())
        });
        let x = normal(&d, DType::F32, &Place::whole(&[768, 128]), &key, 0.0, 1.0)?;
        time("bias grad 768x128", 4.0 * 768.0 * 128.0, 768.0 * 128.0, || {
            drop(sum_to(&x, &[128]).unwrap())
        });
    }
    Ok(())
}
