//! templates/device/params.cuh: the views and the parameter struct that kernels get, from their
//! Rust definitions.

use crate::{expect, read};

#[test]
fn params_cuh_is_what_the_rust_structs_give() {
    let (views, params) = (read("src/call.rs"), read("src/kernel/params.rs"));
    let bytes = params.split_once("KERNEL_PARAMS_BYTES: usize = ").unwrap().1.split(';').next().unwrap();
    let made = format!(
        "// The one parameter struct of every kernel. `make header` makes this file from src/kernel/params.rs\n\
         // and src/call.rs. Strides are in elements and 64-bit; the last dim is contiguous.\n\
         \n\
         #include \"device/types.cuh\"\n\
         \n\
         {}\n{}\n{}\n{}\
         static_assert(sizeof(KernelParams) == {bytes}, \"KernelParams differs from src/kernel/params.rs\");\n",
        structure(&views, "TensorRef"),
        structure(&views, "ScoresRef"),
        structure(&views, "BlockLists"),
        structure(&params, "KernelParams"),
    );
    expect("templates/device/params.cuh", &made);
}

/// A struct in CUDA, with the comments of the Rust one.
fn structure(text: &str, name: &str) -> String {
    let start = text.find(&format!("pub struct {name} {{\n")).unwrap_or_else(|| panic!("there is no struct {name}"));
    let (before, body) = (&text[..start], text[start..].split_once('\n').unwrap().1);
    let doc: Vec<&str> =
        before.lines().rev().take_while(|line| line.starts_with("///") || line.starts_with("#[")).collect();
    let mut made: String =
        doc.into_iter().rev().filter_map(|line| line.strip_prefix("///")).map(|line| format!("//{line}\n")).collect();
    made += &format!("struct {} {{\n", cuda_name(name));
    for line in body.lines().take_while(|line| *line != "}") {
        let line = line.trim();
        match line.strip_prefix("///") {
            Some(comment) => made += &format!("    //{comment}\n"),
            None => {
                let field = line.strip_prefix("pub ").and_then(|field| field.strip_suffix(','));
                let (field, kind) = field.and_then(|field| field.split_once(": ")).unwrap_or_else(|| panic!("{line}"));
                made += &format!("    {} {field};\n", cuda_type(kind));
            }
        }
    }
    made + "};\n"
}

fn cuda_name(name: &str) -> &str {
    match name {
        "TensorRef" => "TensorView",
        "ScoresRef" => "ScoresView",
        "BlockLists" => "BlockListsView",
        other => other,
    }
}

fn cuda_type(kind: &str) -> String {
    if let Some(pointee) = kind.strip_prefix("*const ") {
        return format!("const {}*", cuda_type(pointee));
    }
    if let Some(pointee) = kind.strip_prefix("*mut ") {
        return format!("{}*", cuda_type(pointee));
    }
    match kind {
        "c_void" => "void",
        "f32" => "float",
        "i32" => "int",
        "u32" => "uint32",
        "i64" => "int64",
        "u64" => "uint64",
        other => cuda_name(other),
    }
    .to_owned()
}
