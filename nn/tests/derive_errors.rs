//! The messages of the compiler about `#[derive(Module)]`: `derive_errors/*.rs` do not compile, for the reasons in the
//! files `*.stderr` beside them. `TRYBUILD=overwrite` rewrites these.

#[test]
fn errors_name_the_field_and_the_remedy() {
    trybuild::TestCases::new().compile_fail("tests/derive_errors/*.rs");
}
