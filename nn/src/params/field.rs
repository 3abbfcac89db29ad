//! Fields of modules: which types `#[derive(Module)]` visits and which it skips.
//!
//! The macro knows only the text of a type, so the compiler chooses here. `(&&&&Field(&field)).visit_field(f)` finds the
//! method that needs the fewest dereferences, among those whose bounds hold: [`VisitModule`], then [`SkipPlain`], then
//! [`SkipCopy`], then the method of [`Field`] itself, whose bound never holds: that is the error.

use std::marker::PhantomData;
use std::ops::Range;

use crate::{Module, Param, RandomSite};

/// A field, during a visit.
pub struct Field<'a, T: ?Sized>(pub &'a T);

/// Visits fields that are modules.
pub trait VisitModule {
    /// Calls `f` with every parameter of the field.
    fn visit_field(&self, f: &mut dyn FnMut(&Param));
}

impl<T: Module + ?Sized> VisitModule for &&&Field<'_, T> {
    fn visit_field(&self, f: &mut dyn FnMut(&Param)) {
        self.0.visit(f);
    }
}

/// Skips fields of a [`Plain`] type.
pub trait SkipPlain {
    /// Does nothing.
    fn visit_field(&self, _: &mut dyn FnMut(&Param)) {}
}

impl<T: Plain> SkipPlain for &&Field<'_, T> {}

/// Skips fields of a `Copy` type. It cannot hold a parameter, because [`Param`] is not `Copy`; nor refer to one, because
/// models do not live in statics.
pub trait SkipCopy {
    /// Does nothing.
    fn visit_field(&self, _: &mut dyn FnMut(&Param)) {}
}

impl<T: Copy + 'static> SkipCopy for &Field<'_, T> {}

impl<T: ?Sized> Field<'_, T> {
    /// Does not compile: names the type of the field and the remedies.
    pub fn visit_field(&self, _: &mut dyn FnMut(&Param))
    where
        T: VisitedOrSkipped,
    {
    }
}

/// Has no implementations.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither a `Module` nor plain data, so this field may hold parameters",
    label = "neither visited nor skipped",
    note = "if `{Self}` holds parameters, derive `Module` for it",
    note = "if it holds none, write `#[module(skip)]` above the field"
)]
pub trait VisitedOrSkipped {}

/// Types without parameters that are not `Copy`.
pub trait Plain {}

impl Plain for String {}
impl Plain for &str {}
impl Plain for RandomSite {}
impl<T: Copy + 'static> Plain for Range<T> {}
impl<T: Copy + 'static> Plain for Vec<T> {}
impl<T: ?Sized> Plain for PhantomData<T> {}
