//! `#[derive(Module)]`: writes `Module::visit` from the fields of a type.
//!
//! The macro emits one call for each field. The types of `ferrotron_nn::field` decide whether the call visits the field
//! or skips it, because only the compiler knows which traits a field's type implements.
#![deny(missing_docs)]

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote_spanned};
use syn::spanned::Spanned;
use syn::{Attribute, Data, DeriveInput, Error, Field, Fields, Index, Member, Result, Type};
use syn::{parse_macro_input, parse_quote};

/// Implements `Module` for a struct or an enum: `visit` visits the fields in the order of their declaration.
///
/// Declare fields in the order of the forward pass. The type of a field decides about it:
///
/// | type of the field | |
/// |---|---|
/// | implements `Module`: `Param`, layers, `Option`, `Vec`, `Box`, `Arc`, pairs, arrays and references of them | visited |
/// | cannot hold a parameter: `Copy` types such as numbers and small configurations, `String`, `Range`, `Vec` of `Copy` types | skipped |
/// | anything else | an error of the compiler |
///
/// The error has two remedies: derive `Module` for the field's type, or leave the field out with `#[module(skip)]`.
/// A `HashMap` of layers needs a written `visit`, because it has no order.
///
/// ```
/// use ferrotron::prelude::*;
///
/// #[derive(Module)]
/// struct Model {
///     name: String,          // no parameters: skipped
///     hidden: usize,         // no parameters: skipped
///     wte: Embedding,        // visited first
///     layers: Vec<Layer>,    // then each layer in order
///     norm: Option<RmsNorm>, // then the norm, if there is one
///     head: Param,           // last; here a clone of the weight of `wte`
///     #[module(skip)]
///     config: GptConfig,     // neither `Module` nor `Copy`: left out on request
/// }
///
/// /// The fields of the variant at hand are visited.
/// #[derive(Module)]
/// enum Layer {
///     Mlp(Mlp),
///     Residual { norm: RmsNorm, inner: Box<Layer> },
/// }
///
/// # let device = Device::cpu(1)?;
/// # let scope = Scope::new(&device, DType::F32, 1234);
/// # let init = Init::Normal { std: 0.02 };
/// # let mlp = MlpConfig {
/// #     hidden: 4, ffn_hidden: 8, activation: Activation::Relu, bias: Bias::No, init, residual_init: init,
/// # };
/// # let wte = Embedding::new(&scope.child("wte"), 5, 4, init)?;
/// # let model = Model {
/// #     name: "model".to_string(),
/// #     hidden: 4,
/// #     layers: vec![
/// #         Layer::Mlp(Mlp::new(&scope.child("0"), &mlp)?),
/// #         Layer::Residual {
/// #             norm: RmsNorm::new(&scope.child("1.norm"), 4, 1e-5),
/// #             inner: Box::new(Layer::Mlp(Mlp::new(&scope.child("1"), &mlp)?)),
/// #         },
/// #     ],
/// #     norm: Some(RmsNorm::new(&scope.child("norm"), 4, 1e-5)),
/// #     head: wte.weight().clone(),
/// #     wte,
/// #     config: GptConfig::gpt2(5, 2, 4, 1, 16),
/// # };
/// let mut names = Vec::new();
/// model.visit(&mut |param| names.push(param.name().to_string()));
/// assert_eq!(names, [
///     "wte.weight", "0.fc.weight", "0.proj.weight", "1.norm.weight", "1.fc.weight", "1.proj.weight", "norm.weight",
///     "wte.weight",
/// ]);
/// # assert_eq!((model.name.as_str(), model.hidden, model.config.num_layers), ("model", 4, 2));
/// # Ok::<(), ferrotron::Error>(())
/// ```
///
/// # Tied weights
///
/// `visit` visits a parameter once for each use. A model that uses one weight twice holds two clones of its `Param`, each
/// at the place of its use, as `wte` and `head` above. `Module::params` returns the parameter once. Put
/// `#[module(skip)]` on a clone that the forward pass does not use.
///
/// # Type parameters
///
/// A type parameter that occurs in the type of a field gets the bound `Module`, unless the field is skipped by
/// `#[module(skip)]` or is a `PhantomData`.
///
/// ```
/// use ferrotron::prelude::*;
///
/// #[derive(Module)]
/// struct Normed<M> {
///     norm: RmsNorm,
///     inner: M,
/// }
/// # let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
/// # let [norm, inner] = ["norm", "inner"].map(|name| RmsNorm::new(&scope.child(name), 4, 1e-5));
/// assert_eq!(Normed { norm, inner }.params().len(), 2);
/// # Ok::<(), ferrotron::Error>(())
/// ```
///
/// # Crates without the facade
///
/// The written code names `::ferrotron::nn`. A crate that depends on `ferrotron-nn` alone says once, at its root, that
/// this is the same: `extern crate ferrotron_nn as ferrotron;`.
///
/// # Errors
///
/// Nothing is forgotten silently. This field may hold parameters:
///
/// ```compile_fail
/// use ferrotron::prelude::*;
///
/// struct Head { weight: Param } // `#[derive(Module)]` is missing
///
/// #[derive(Module)]
/// struct Model { head: Head }
/// ```
#[proc_macro_derive(Module, attributes(module))]
pub fn derive_module(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(input).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(input: DeriveInput) -> Result<TokenStream> {
    let DeriveInput { attrs, ident, mut generics, data, .. } = input;
    refuse_attributes(&attrs)?;
    // Names of the expansion cannot collide with those of the user.
    let here = Span::mixed_site();
    let nn = quote_spanned!(here=> ::ferrotron::nn);
    // The arms of a match: the path of a struct or variant, and its visited fields.
    let arms: Vec<(TokenStream, Vec<(Member, Field)>)> = match data {
        Data::Struct(data) => vec![(parse_quote!(Self), visited(data.fields)?)],
        Data::Enum(data) => data
            .variants
            .into_iter()
            .map(|variant| {
                refuse_attributes(&variant.attrs)?;
                let name = variant.ident;
                Ok((parse_quote!(Self::#name), visited(variant.fields)?))
            })
            .collect::<Result<_>>()?,
        Data::Union(data) => {
            let message =
                "`Module` cannot be derived for a union: the field that holds a value is not known";
            return Err(Error::new(data.union_token.span, message));
        }
    };

    let types: Vec<&Type> =
        arms.iter().flat_map(|(_, fields)| fields).map(|(_, field)| &field.ty).collect();
    let params: Vec<Ident> = generics.type_params().map(|param| param.ident.clone()).collect();
    for param in params {
        if types.iter().any(|ty| !is_phantom(ty) && contains(ty.to_token_stream(), &param)) {
            generics.make_where_clause().predicates.push(parse_quote!(#param: #nn::Module));
        }
    }

    let arms = arms.iter().map(|(path, fields)| {
        let names = (0..fields.len()).map(|i| format_ident!("field_{i}", span = here));
        let names: Vec<Ident> = names.collect();
        let members = fields.iter().map(|(member, _)| member);
        let visits = fields.iter().zip(&names).map(|((_, field), name)| {
            // An error about the type points to it.
            let at = here.located_at(field.ty.span());
            quote_spanned!(at=> (&&&&#nn::field::Field(#name)).visit_field(f);)
        });
        quote_spanned!(here=> #path { #(#members: ref #names,)* .. } => { #(#visits)* })
    });
    let (impl_generics, ty_generics, where_clause) = generics.split_for_impl();
    Ok(quote_spanned! {here=>
        #[automatically_derived]
        impl #impl_generics #nn::Module for #ident #ty_generics #where_clause {
            #[allow(unused_imports, unused_variables)]
            fn visit(&self, f: &mut dyn ::core::ops::FnMut(&#nn::Param)) {
                use #nn::field::{SkipCopy as _, SkipPlain as _, VisitModule as _};
                match *self { #(#arms)* }
            }
        }
    })
}

/// The fields without `#[module(skip)]`, in order.
fn visited(fields: Fields) -> Result<Vec<(Member, Field)>> {
    let mut visited = Vec::new();
    for (i, field) in fields.into_iter().enumerate() {
        if !is_skipped(&field)? {
            let member = match &field.ident {
                Some(name) => Member::Named(name.clone()),
                None => Member::Unnamed(Index { index: i as u32, span: field.ty.span() }),
            };
            visited.push((member, field));
        }
    }
    Ok(visited)
}

fn is_skipped(field: &Field) -> Result<bool> {
    let mut skipped = false;
    for attribute in field.attrs.iter().filter(|attribute| attribute.path().is_ident("module")) {
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("skip") {
                return Err(meta.error("unknown option: `#[module(skip)]` is the only one"));
            }
            skipped = true;
            Ok(())
        })?;
    }
    Ok(skipped)
}

fn refuse_attributes(attributes: &[Attribute]) -> Result<()> {
    match attributes.iter().find(|attribute| attribute.path().is_ident("module")) {
        Some(found) => Err(Error::new_spanned(found, "`#[module(skip)]` belongs to a field")),
        None => Ok(()),
    }
}

/// Returns whether `ty` is a `PhantomData`, which says nothing about its type parameters.
fn is_phantom(ty: &Type) -> bool {
    let Type::Path(ty) = ty else { return false };
    ty.path.segments.last().is_some_and(|segment| segment.ident == "PhantomData")
}

fn contains(tokens: TokenStream, name: &Ident) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == *name,
        TokenTree::Group(group) => contains(group.stream(), name),
        _ => false,
    })
}
