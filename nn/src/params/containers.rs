//! Modules made of modules: a parameter alone, pointers, options, pairs and sequences.

use std::sync::Arc;

use crate::{Module, Param};

impl Module for Param {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        f(self);
    }
}

/// Types that lend one module.
macro_rules! pointers {
    ($($pointer:ty),+) => {$(
        impl<T: Module + ?Sized> Module for $pointer {
            fn visit(&self, f: &mut dyn FnMut(&Param)) {
                (**self).visit(f);
            }
        }
    )+};
}
pointers!(&T, Box<T>, Arc<T>);

impl<T: Module> Module for Option<T> {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.iter().for_each(|module| module.visit(f));
    }
}

impl<A: Module, B: Module> Module for (A, B) {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.0.visit(f);
        self.1.visit(f);
    }
}

impl<T: Module> Module for [T] {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.iter().for_each(|module| module.visit(f));
    }
}

impl<T: Module> Module for Vec<T> {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self[..].visit(f);
    }
}

impl<T: Module, const N: usize> Module for [T; N] {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self[..].visit(f);
    }
}
