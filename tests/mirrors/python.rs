//! bindings/python/flashtune/_header.py: the numbers and structs of the C header, for ctypes.

use crate::{expect, read};

#[test]
fn header_py_is_what_the_c_header_gives() {
    let header = read("include/flashtune.h");
    let code: String = header.split("/*").map(|part| part.split_once("*/").map_or(part, |(_, code)| code)).collect();
    let mut made = String::from(
        "\"\"\"The C header's numbers and structs for ctypes, made from include/flashtune.h by `make header`.\n\
         \n\
         Names are the header's without `flashtune_`. A pointer is c_void_p; a string is c_char_p.\n\
         \"\"\"\n\
         \n\
         import ctypes\n\
         from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p\n\
         \n",
    );
    let mut lines = code.lines().map(str::trim).filter(|line| !line.is_empty());
    while let Some(line) = lines.next() {
        if let Some((name, number)) = line.strip_prefix("#define FLASHTUNE_").and_then(|define| define.split_once(' '))
        {
            if number.parse::<u64>().is_ok() {
                made += &format!("{name} = {number}\n");
            }
        } else if let Some(name) =
            line.strip_prefix("typedef struct flashtune_").and_then(|rest| rest.strip_suffix(" {"))
        {
            let fields: Vec<&str> = lines.by_ref().take_while(|line| !line.starts_with('}')).collect();
            let head = format!("\n\nclass {}(ctypes.Structure):\n    _fields_ = [\n", class(name));
            // ctypes has no const: one class stands for a struct of inputs and the one of outputs.
            if made.contains(&head) {
                continue;
            }
            made += &head;
            for field in fields {
                let (name, kind) = field_of(field.strip_suffix(';').unwrap());
                made += &format!("        (\"{name}\", {kind}),\n");
            }
            made += "    ]\n";
        } else if let Some((result, rest)) =
            line.strip_prefix("typedef ").and_then(|line| line.split_once(" (*flashtune_"))
        {
            let (name, arguments) = rest.split_once(")(").unwrap();
            let arguments = arguments.strip_suffix(");").unwrap().split(", ");
            let kinds: Vec<String> = arguments.map(argument).collect();
            made += &format!(
                "\n\n{} = ctypes.CFUNCTYPE({}, {})\n",
                name.to_uppercase(),
                python_type(result),
                kinds.join(", ")
            );
        }
    }
    expect("bindings/python/flashtune/_header.py", &made);
}

/// `flashtune_block_mask` is BlockMask, and `flashtune_const_tensor` is Tensor.
fn class(name: &str) -> String {
    let word = |word: &str| word[..1].to_uppercase() + &word[1..];
    name.trim_start_matches("const_").split('_').map(word).collect()
}

/// A field's name and type, of `const int32_t *indices` or `char kernel[64]`.
fn field_of(field: &str) -> (String, String) {
    let (kind, name) = field.rsplit_once(' ').unwrap();
    if let Some((name, count)) = name.strip_suffix(']').and_then(|name| name.split_once('[')) {
        return (name.to_owned(), format!("{} * {count}", python_type(kind)));
    }
    match name.strip_prefix('*') {
        Some(name) => (name.to_owned(), python_type(&format!("{kind} *"))),
        None => (name.to_owned(), python_type(kind)),
    }
}

/// The type of a callback's argument, which may be a struct of the header.
fn argument(argument: &str) -> String {
    match argument.strip_prefix("const struct flashtune_").and_then(|rest| rest.split_once(" *")) {
        Some((name, _)) => format!("POINTER({})", class(name)),
        None => field_of(argument).1,
    }
}

fn python_type(kind: &str) -> String {
    match kind {
        "void" => "None".to_owned(),
        "const char *" => "c_char_p".to_owned(),
        "char" | "float" | "double" => format!("c_{kind}"),
        pointer if pointer.ends_with('*') => "c_void_p".to_owned(),
        other => match (other.strip_suffix("_t"), other.trim_start_matches("struct ").strip_prefix("flashtune_")) {
            (Some(integer), _) => format!("c_{integer}"),
            (_, Some(callback)) if callback.ends_with("_callback") => callback.to_uppercase(),
            (_, Some(structure)) => class(structure),
            _ => panic!("{kind} has no type in ctypes"),
        },
    }
}
