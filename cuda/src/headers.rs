//! Compares declarations of this crate with NVIDIA's headers, which pip's packages have beside the libraries.

use std::ffi::OsStr;
use std::process::Command;

use crate::library::Search;

/// A function of the C calling convention, with the sizes of its arguments.
pub(crate) trait Signature {
    /// Bytes of each argument.
    const SIZES: &'static [usize];
}

macro_rules! signatures {
    ($(($($argument:ident)*))*) => {$(
        impl<R, $($argument),*> Signature for unsafe extern "C" fn($($argument),*) -> R {
            const SIZES: &'static [usize] = &[$(size_of::<$argument>()),*];
        }
    )*};
}
signatures! {
    ()
    (A)
    (A B)
    (A B C)
    (A B C D)
    (A B C D E)
    (A B C D E F)
    (A B C D E F G)
    (A B C D E F G H)
    (A B C D E F G H I J)
    (A B C D E F G H I J K L M N O P)
}

/// The claim that the header declares `name` with arguments of the sizes of `_function`'s.
pub(crate) fn function<F: Signature>(name: &str, _function: F) -> String {
    takes(name, F::SIZES)
}

/// The claim that the header declares `name` with arguments of these sizes.
pub(crate) fn takes(name: &str, sizes: &[usize]) -> String {
    let sizes = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    claim(&format!("takes({name}, {{{sizes}}})"))
}

/// The claim that the header's `name` is `value`.
pub(crate) fn constant(name: &str, value: i64) -> String {
    claim(&format!("(long long){name} == {value}ll"))
}

/// The claim that C++ finds the condition true.
pub(crate) fn claim(condition: &str) -> String {
    format!("static_assert({condition}, R\"({condition})\");\n")
}

/// Compiles claims about a header, and returns what the statements `main` print; nothing, and a line that says so for
/// `test`, where the header or g++ is missing.
///
/// Panics with g++'s words if a claim is false.
pub(crate) fn program(test: &str, header: &str, claims: &[String], main: &str) -> Option<String> {
    let search = Search::from_environment();
    let folders = search.folders().iter().map(|folder| folder.with_file_name("include"));
    let folders: Vec<_> = folders.filter(|folder| folder.is_dir()).collect();
    if !folders.iter().any(|folder| folder.join(header).exists()) {
        println!("skipped: {test}: no {header} beside NVIDIA's libraries");
        return None;
    }
    if Command::new("g++").arg("--version").output().is_err() {
        println!("skipped: {test}: headers are read with g++ (apt install g++)");
        return None;
    }
    // The number types include headers of a package of their own, and no declaration in use has one.
    let text = format!(
        "#define __CUDA_FP16_H__\n#define __CUDA_BF16_H__\n#define __CUDA_FP8_H__\n\
         struct __half {{ unsigned short bits; }};\nstruct __nv_bfloat16 {{ unsigned short bits; }};\n\
         #include <{header}>\n#include <cstddef>\n#include <cstdio>\n#include <initializer_list>\n\
         template <class R, class... A>\n\
         constexpr bool takes(R (*)(A...), std::initializer_list<size_t> sizes) {{\n\
         \x20   const size_t own[] = {{sizeof(A)..., 0}};\n\
         \x20   if (sizes.size() != sizeof...(A)) return false;\n\
         \x20   size_t at = 0;\n\
         \x20   for (size_t size : sizes)\n\
         \x20       if (size != own[at++]) return false;\n\
         \x20   return true;\n\
         }}\n\
         {}int main() {{\n{main}\n}}\n",
        claims.concat()
    );
    let scratch = tempfile::tempdir().unwrap();
    let (source, made) = (scratch.path().join("claims.cpp"), scratch.path().join("claims"));
    std::fs::write(&source, text).unwrap();
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-w", "-O0", "-o"]).args([made.as_os_str(), source.as_os_str()]);
    folders.iter().for_each(|folder| {
        command.args([OsStr::new("-I"), folder.as_os_str()]);
    });
    let out = command.output().unwrap();
    assert!(out.status.success(), "{test}: {header}:\n{}", String::from_utf8_lossy(&out.stderr));
    let out = Command::new(&made).output().unwrap();
    Some(String::from_utf8(out.stdout).unwrap())
}

#[test]
#[should_panic(expected = "static assertion failed")]
fn a_false_claim_is_found() {
    let test = "a_false_claim_is_found";
    if program(test, "cuda.h", &[takes("cuInit", &[4])], "").is_none() {
        panic!("static assertion failed, or so a machine without headers must say");
    }
    program(test, "cuda.h", &[takes("cuInit", &[8])], "");
}
