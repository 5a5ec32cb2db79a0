//! Rendering: from (problem class, config, architecture) to one self-contained CUDA text. The same
//! input gives the same bytes.
//!
//! First Tera fills in the template. Then this file replaces the first `#include "device/x.cuh"` of
//! each device file by the file's text, which Tera does not see, and drops later ones. Last, it
//! puts the class constants (`constants`) that the text mentions on top. The text depends only on
//! the values that it uses, so configs that differ only in unused knobs share a kernel. This file
//! knows nothing of GPUs, compilers or caches.

use super::constants::{self, ARCH, Value};
use super::sources::{Sources, embedded, overridden};
use super::template_limits;
use crate::config::{Config, Family};
use crate::device::Arch;
use crate::environment;
use crate::error::{Error, Result, Status};
use crate::family;
use crate::family::spec::{Arguments, Axis, KEY_COLS, KernelSpec};
use crate::problem::{Dtype, MAX_SPLITS, Problem};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::OnceLock;
use tera::{Context, Delimiters, Tera};

/// A set of parsed template files.
pub struct Renderer {
    tera: Tera,
    sources: Sources,
}

impl Renderer {
    pub fn new(sources: Sources) -> Result<Renderer> {
        let mut tera = Tera::new();
        let delimiters = Delimiters {
            block_start: "@[".into(),
            block_end: "]@".into(),
            variable_start: "@{".into(),
            variable_end: "}@".into(),
            comment_start: "@*".into(),
            comment_end: "*@".into(),
        };
        tera.set_delimiters(delimiters).map_err(template_error)?;
        tera.autoescape_on(Vec::<&str>::new());
        template_limits::register(&mut tera);
        let templates = sources.iter().filter(|(name, _)| name.ends_with(TERA));
        tera.add_raw_templates(templates.map(|(name, text)| (name.as_str(), text.as_str()))).map_err(template_error)?;
        Ok(Renderer { tera, sources })
    }

    /// The library's files, with the overrides that `FLASHTUNE_TEMPLATES` named when the process
    /// first rendered.
    pub(super) fn shared() -> Result<&'static Renderer> {
        static SHARED: OnceLock<Result<Renderer>> = OnceLock::new();
        let shared = SHARED.get_or_init(|| {
            let folder = environment::variable("FLASHTUNE_TEMPLATES").filter(|folder| !folder.is_empty());
            Renderer::new(match folder {
                Some(folder) => overridden(&PathBuf::from(folder))?,
                None => embedded(),
            })
        });
        shared.as_ref().map_err(Error::clone)
    }

    /// A digest of all template files. What tuning learned about kernels, such as a failure, is
    /// valid only for templates of the same digest.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for (name, text) in &self.sources {
            hash.update((name.len() as u64).to_le_bytes());
            hash.update(name);
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        hash.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Renders one kernel from the template that its spec names. It is an error if the template
    /// uses a name that has no value; Tera itself would take such a name as false.
    pub fn render(&self, problem: &Problem, config: &Config, spec: &KernelSpec, arch: Arch) -> Result<String> {
        let config = &spec.config(config);
        let knobs: Vec<&str> = config.knobs.names().collect();
        let mut values = values(&spec.problem(problem), config, spec, arch)?;
        // Rows of int4 hold their scales, and numbers that were widened have none.
        let has_key_scales = problem.features.has_key_scales();
        let has_tile_scales = problem.features.eight_bits.is_some() && !has_key_scales;
        for (name, has) in [("has_widened_key_scales", has_key_scales), ("has_widened_tile_scales", has_tile_scales)] {
            values.insert(name.to_owned(), Value::Flag(spec.reads_widened && has));
        }
        self.fill(spec.template, &values, config.family, &knobs, arch, Some(&spec.problem(problem)))
    }

    /// Renders `templates/<template>.cu.tera` with these values. The comment on top of the text
    /// lists the values named by `knobs` after the family. Without a problem the text gets no class
    /// constants.
    pub(super) fn fill(
        &self,
        template: &str,
        values: &BTreeMap<String, Value>,
        family: Family,
        knobs: &[&str],
        arch: Arch,
        problem: Option<&Problem>,
    ) -> Result<String> {
        let mut used = self.names(template)?;
        let unknown: Vec<&str> = used.iter().filter(|name| !values.contains_key(**name)).copied().collect();
        if !unknown.is_empty() {
            return Err(Error::new(
                Status::InvalidArgument,
                format!(
                    "{template}{SUFFIX} uses {}, which neither the problem nor the config ({}) gives",
                    unknown.join(", "),
                    knobs.join(", ")
                ),
            ));
        }
        let mut context = Context::new();
        for name in &used {
            match &values[*name] {
                Value::Integer(value) => context.insert(name.to_string(), value),
                Value::Flag(value) => context.insert(name.to_string(), value),
                Value::Name(value) => context.insert(name.to_string(), value),
            }
        }
        let file = format!("{template}{SUFFIX}");
        let filled = template_limits::render(&self.tera, &file, &context).map_err(template_error)?;
        let mut spliced = Vec::new();
        let body = self.splice(&filled, &mut spliced)?;
        let declarations = problem.map_or(Vec::new(), |p| constants::declared(p, &values[ARCH], &body));
        used.extend(declarations.iter().map(|declaration| declaration.tag));
        let block: String = declarations.iter().map(|declaration| declaration.line.as_str()).collect();
        let block = if block.is_empty() { block } else { format!("{PROBLEM_BEGINS}{block}{PROBLEM_ENDS}") };
        Ok(header(template, (family, knobs), arch, values, &used, &spliced) + &block + &body)
    }

    /// The names of values and knobs that a template uses.
    pub fn names(&self, template: &str) -> Result<BTreeSet<&str>> {
        let file = format!("{template}{SUFFIX}");
        if !self.sources.contains_key(&file) {
            let known: Vec<&str> = self.sources.keys().filter_map(|name| name.strip_suffix(SUFFIX)).collect();
            return Err(Error::invalid(format!(
                "{template:?} is not a template; the templates are {}",
                known.join(", ")
            )));
        }
        Ok(self.tera.get_template_variables(&file).map_err(template_error)?.into_iter().collect())
    }

    /// Replaces each quoted include by its file at the first mention, and drops later mentions.
    fn splice<'a>(&'a self, text: &str, spliced: &mut Vec<&'a str>) -> Result<String> {
        let mut out = String::with_capacity(text.len());
        for line in text.lines() {
            let Some(name) = included(line) else {
                out.push_str(line);
                out.push('\n');
                continue;
            };
            let (name, file) = self.sources.get_key_value(name).ok_or_else(|| {
                Error::invalid(format!("#include \"{name}\" names no file under templates/; write \"device/….cuh\""))
            })?;
            if !spliced.contains(&name.as_str()) {
                spliced.push(name);
                out.push_str(&format!("// ---- {name}\n"));
                out.push_str(&self.splice(file, spliced)?);
            }
        }
        Ok(out)
    }
}

const SUFFIX: &str = ".cu.tera";
/// The suffix of kernel templates and of the component files that they use.
const TERA: &str = ".tera";
const PROBLEM_BEGINS: &str = "// ---- problem ------------------------------------------------------------------------------------------------------\n";
const PROBLEM_ENDS: &str = "// -------------------------------------------------------------------------------------------------------------------\n\n";

fn values(problem: &Problem, config: &Config, spec: &KernelSpec, arch: Arch) -> Result<BTreeMap<String, Value>> {
    if !family::takes(config.family, problem.dtype) {
        let family = config.family.name();
        return Err(Error::unsupported(format!(
            "dtype is fp32; {family} kernels take fp16 and bf16 (only sm80 kernels take fp32)"
        )));
    }
    let Arch::Sm(major, minor) = arch else {
        return Err(Error::invalid("the architecture is cpu; a kernel is rendered for sm_80, sm_90, …"));
    };
    let mut values: BTreeMap<String, Value> = constants::tag_values(problem).collect();
    // The PTX name of a 16-bit dtype. Kernels for fp32 do not use it.
    let element = if problem.dtype == Dtype::Fp16 { "f16" } else { "bf16" };
    values.insert("element".to_owned(), Value::Name(element.to_owned()));
    values.insert(ARCH.to_owned(), Value::Integer(major * 10 + minor));
    values.insert("template".to_owned(), Value::Name(spec.template.to_owned()));
    values.insert("max_splits".to_owned(), Value::Integer(MAX_SPLITS as u32));
    values.insert("dq_transposed".to_owned(), Value::Flag(spec.dq_transposed));
    values.insert("key_cols".to_owned(), Value::Integer(KEY_COLS as u32));
    values.insert("has_dq_accum".to_owned(), Value::Flag(spec.direct_tiles == 0));
    values.insert("direct_tiles".to_owned(), Value::Integer(spec.direct_tiles));
    let adds_splits = matches!(spec.axis, Axis::KeySlices | Axis::QueriesAndKeys);
    let may_split = spec.may_split || adds_splits || spec.most_splits > 1 || spec.split_waves > 0;
    values.insert("may_split".to_owned(), Value::Flag(may_split));
    values.insert("splits_last".to_owned(), Value::Flag(spec.split_rest.is_some()));
    // Values of the launch. A template uses them, or asserts that they equal what its tiles need.
    for (name, value) in
        [("smem_bytes", spec.smem_bytes), ("threads", spec.threads), ("rows", spec.rows), ("most_rows", spec.most_rows)]
    {
        values.insert(name.to_owned(), Value::Integer(value));
    }
    let box_rows = match spec.arguments {
        Arguments::ParamsKeyMaps { box_rows, .. } => box_rows,
        Arguments::ParamsMapsCounter { boxes, .. } => boxes.key_rows,
        Arguments::Params => 0,
    };
    values.insert("box_rows".to_owned(), Value::Integer(box_rows));
    if let Some(registers) = spec.registers {
        values.insert("producer_registers".to_owned(), Value::Integer(registers.producer));
        values.insert("consumer_registers".to_owned(), Value::Integer(registers.consumer));
        values.insert("last_consumer_registers".to_owned(), Value::Integer(registers.last_consumer));
    }
    for (knob, value) in config.knobs.iter() {
        if values.insert(knob.to_owned(), Value::Integer(value)).is_some() {
            return Err(Error::invalid(format!(
                "the config sets {knob}, which is no knob: its value follows from the problem"
            )));
        }
    }
    Ok(values)
}

/// The comment on top of the text. It lists only values that the text depends on, so that equal
/// kernels have equal texts.
fn header(
    template: &str,
    (family, knobs): (Family, &[&str]),
    arch: Arch,
    values: &BTreeMap<String, Value>,
    used: &BTreeSet<&str>,
    spliced: &[&str],
) -> String {
    let list = |names: &[&str]| -> String {
        names.iter().filter(|name| used.contains(*name)).map(|name| format!(" {name}={}", values[*name])).collect()
    };
    let files: String = spliced.iter().map(|name| format!(" {name}")).collect();
    format!(
        "// Rendered by flashtune {version}; edit the templates, not this.\n\
         // problem:  {problem}\n\
         // config:   {family}{knobs}\n\
         // files:    {template}{SUFFIX}{files}\n\
         // by hand:  nvcc -std=c++17 --expt-relaxed-constexpr -diag-suppress 177 \
         -arch={arch}{suffix} -cubin -o {template}.cubin {template}.cu\n\n",
        version = env!("CARGO_PKG_VERSION"),
        problem = list(&constants::tags()).trim_start(),
        family = family.name(),
        suffix = family.target_suffix(),
        knobs = list(knobs),
    )
}

/// The name in a line `#include "name"`; None for any other line.
fn included(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("#include")?.trim_start().strip_prefix('"')?.split('"').next()
}

fn template_error(error: tera::Error) -> Error {
    Error::new(Status::CompileFailed, format!("rendering: {error}"))
}
