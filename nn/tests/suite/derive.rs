//! `#[derive(Module)]`: which fields are visited, and in what order.

use ferrotron_nn::{Axis, Bias, Init, Linear, Mode, Module, Param, RmsNorm, Scope, WeightDecay};
use ferrotron_tensor::{DType, Device, Result, ShardSpec};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

fn scope() -> Result<Scope> {
    Ok(Scope::new(&Device::cpu(1)?, DType::F32, 1))
}

fn param(name: &str) -> Result<Param> {
    Ok(scope()?.param(name, &[1], Init::Ones, WeightDecay::Off))
}

fn norm(name: &str) -> Result<RmsNorm> {
    Ok(RmsNorm::new(&scope()?.child(name), 2, 1e-5))
}

fn linear(name: &str, bias: Bias) -> Result<Linear> {
    Linear::new(&scope()?.child(name), 2, 2, bias, Init::Ones)
}

fn names(module: &dyn Module) -> Vec<String> {
    let mut names = Vec::new();
    module.visit(&mut |param| names.push(param.name().to_string()));
    names
}

#[derive(Module)]
struct Unit;

#[derive(Module)]
struct Pair(RmsNorm, usize, Param);

#[derive(Module)]
struct Everything {
    boxed: Box<dyn Module + Send>,
    some: Option<Linear>,
    none: Option<RmsNorm>,
    several: Vec<Pair>,
    array: [Param; 2],
    two: (RmsNorm, Param),
    shared: Arc<RmsNorm>,
    nested: Vec<Option<Box<RmsNorm>>>,
    unit: Unit,
}

#[test]
fn fields_are_visited_in_the_order_of_declaration() -> Result<()> {
    let pair = |i: usize| -> Result<Pair> {
        Ok(Pair(norm(&format!("pair.{i}"))?, i, param(&format!("pair.{i}.last"))?))
    };
    let module = Everything {
        unit: Unit,
        nested: vec![None, Some(Box::new(norm("nested")?))],
        shared: Arc::new(norm("shared")?),
        two: (norm("two.0")?, param("two.1")?),
        array: [param("array.0")?, param("array.1")?],
        several: vec![pair(0)?, pair(1)?],
        none: None,
        some: Some(linear("some", Bias::Yes)?),
        boxed: Box::new(norm("boxed")?),
    };
    let want = [
        "boxed.weight",
        "some.weight",
        "some.bias",
        "pair.0.weight",
        "pair.0.last",
        "pair.1.weight",
        "pair.1.last",
        "array.0",
        "array.1",
        "two.0.weight",
        "two.1",
        "shared.weight",
        "nested.weight",
    ];
    assert_eq!(names(&module), want);
    assert_eq!(module.several[1].1, 1);
    Ok(())
}

/// A configuration that is not `Copy`, and so could hold a parameter.
struct Config {
    name: String,
}

/// Every field but the norm is plain data, or left out.
#[derive(Module)]
struct WithData<'a> {
    path: String,
    label: &'a str,
    size: usize,
    eps: Option<f64>,
    mode: Mode,
    heads: Range<usize>,
    axes: Vec<Axis>,
    widths: [usize; 3],
    function: fn(usize) -> usize,
    norm: RmsNorm,
    #[module(skip)]
    config: Config,
    #[module(skip)]
    place: ShardSpec,
}

#[test]
fn plain_data_is_skipped() -> Result<()> {
    let path = "a path".to_string();
    let module = WithData {
        label: &path,
        path: path.clone(),
        size: 3,
        eps: None,
        mode: Mode::Eval,
        heads: 0..2,
        axes: Axis::ALL.to_vec(),
        widths: [1, 2, 3],
        function: |x| x,
        norm: norm("norm")?,
        config: Config { name: path.clone() },
        place: ShardSpec::unsharded(&[2]),
    };
    assert_eq!(names(&module), ["norm.weight"]);
    let WithData { path, label, size, eps, mode, heads, axes, widths, function, .. } = &module;
    assert_eq!((path.as_str(), &module.config.name, *mode), (*label, path, Mode::Eval));
    assert_eq!((function(*size), *eps, heads.len(), axes.len(), widths[0]), (3, None, 2, 4, 1));
    assert_eq!(module.place.dims(), [2]);
    Ok(())
}

/// A type that is not a module. A type parameter without a module in any visited field needs no bound.
struct Kind;

#[derive(Module)]
struct Generic<'a, M, K, const N: usize>
where
    M: Clone,
{
    kind: PhantomData<K>,
    first: &'a M,
    others: [Vec<M>; N],
    #[module(skip)]
    skipped: K,
}

#[test]
fn type_parameters_lifetimes_and_constants() -> Result<()> {
    let first = norm("first")?;
    let module = Generic {
        kind: PhantomData,
        first: &first,
        others: [vec![norm("0")?, norm("1")?], vec![norm("2")?]],
        skipped: Kind,
    };
    assert_eq!(names(&module), ["first.weight", "0.weight", "1.weight", "2.weight"]);
    let (PhantomData, Kind) = (module.kind, module.skipped);
    Ok(())
}

#[derive(Module)]
#[expect(clippy::large_enum_variant, reason = "a test has few of them")]
enum Layer {
    Nothing,
    Norm(RmsNorm),
    Residual {
        scale: f64,
        norm: RmsNorm,
        inner: Box<Layer>,
        #[module(skip)]
        unused: Param,
    },
    Two(usize, Box<Linear>, #[module(skip)] Config, Box<Linear>),
}

#[derive(Module)]
enum Never {}

#[test]
fn the_fields_of_the_variant_at_hand_are_visited() -> Result<()> {
    let layers = vec![
        Layer::Nothing,
        Layer::Norm(norm("a")?),
        Layer::Residual {
            scale: 0.5,
            norm: norm("b")?,
            inner: Box::new(Layer::Norm(norm("c")?)),
            unused: param("unused")?,
        },
        Layer::Two(
            1,
            Box::new(linear("d", Bias::No)?),
            Config { name: String::new() },
            Box::new(linear("e", Bias::No)?),
        ),
    ];
    let want = ["a.weight", "b.weight", "c.weight", "d.weight", "e.weight"];
    assert_eq!(names(&layers), want);
    assert!(names(&None::<Never>).is_empty());
    for layer in &layers {
        match layer {
            Layer::Residual { scale, unused, .. } => {
                assert_eq!((*scale, unused.name()), (0.5, "unused"));
            }
            Layer::Two(count, _, config, _) => assert_eq!((*count, config.name.len()), (1, 0)),
            Layer::Nothing | Layer::Norm(_) => {}
        }
    }
    Ok(())
}

#[derive(Module)]
struct Tied {
    wte: Linear,
    norm: RmsNorm,
    head: Param,
}

#[test]
fn a_tied_weight_is_visited_once_for_each_use() -> Result<()> {
    let wte = linear("wte", Bias::No)?;
    let tied = Tied { head: wte.weight().clone(), wte, norm: norm("norm")? };
    assert_eq!(names(&tied), ["wte.weight", "norm.weight", "wte.weight"]);
    let params: Vec<String> = tied.params().iter().map(|param| param.name().to_string()).collect();
    assert_eq!(params, ["wte.weight", "norm.weight"]);
    Ok(())
}

/// The names of the expansion and of the prelude do not collide with the user's.
#[test]
fn names_of_the_user_do_not_matter() -> Result<()> {
    #[derive(Module)]
    struct Field {
        f: RmsNorm,
        field_0: Param,
        r#type: Param,
    }
    let module = Field { f: norm("f")?, field_0: param("0")?, r#type: param("type")? };
    assert_eq!(names(&module), ["f.weight", "0", "type"]);
    Ok(())
}
