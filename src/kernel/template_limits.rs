//! Limits of a rendering: a template of the user that loops or prints without end is an error.
//!
//! The library's own templates stay far below them. A loop over a list that was made once is not
//! counted, as long as it prints nothing.

use std::cell::Cell;
use std::io::{ErrorKind, Result, Write};
use tera::{Kwargs, State, Tera, TeraResult};

/// The steps that all calls of `range` in one rendering give.
const MAX_STEPS: u64 = 1_000_000;
/// The largest kernel has some 200 KB.
const MAX_TEXT_BYTES: usize = 16 << 20;

thread_local! {
    /// The steps that are left to this thread's rendering.
    static STEPS: Cell<u64> = const { Cell::new(MAX_STEPS) };
}

/// Replaces Tera's `range`, whose limit holds for one call and not for loops inside of loops.
pub fn register(tera: &mut Tera) {
    tera.register_function("range", range);
}

/// Renders one template with a context.
pub fn render(tera: &Tera, template: &str, context: &tera::Context) -> TeraResult<String> {
    STEPS.set(MAX_STEPS);
    let mut text = Text::default();
    let rendered = tera.render_to(template, context, &mut text);
    // Tera's error names the kind alone.
    if rendered.is_err() && text.is_full {
        return Err(tera::Error::message(format!("{template} prints more than {MAX_TEXT_BYTES} bytes")));
    }
    rendered?;
    // Templates and values are text.
    Ok(String::from_utf8(text.bytes).unwrap_or_default())
}

fn range(arguments: Kwargs, _: &State) -> TeraResult<Vec<i128>> {
    let start = arguments.get::<i128>("start")?.unwrap_or_default();
    let end = arguments.must_get::<i128>("end")?;
    let step = arguments.get::<i128>("step_by")?.unwrap_or(1);
    let left = STEPS.get();
    let numbers: Option<Vec<i128>> = usize::try_from(step).ok().filter(|step| *step > 0).and_then(|step| {
        let steps = end.checked_sub(start)?.max(0) as u128 / step as u128;
        (steps < u128::from(left)).then(|| (start..end).step_by(step).collect())
    });
    match numbers {
        Some(numbers) => {
            STEPS.set(left.saturating_sub(numbers.len() as u64));
            Ok(numbers)
        }
        None => Err(tera::Error::message(format!(
            "range(start={start}, end={end}, step_by={step}) has no positive step, or the loops of the template have more than {MAX_STEPS} steps"
        ))),
    }
}

#[derive(Default)]
struct Text {
    bytes: Vec<u8>,
    is_full: bool,
}

impl Write for Text {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_TEXT_BYTES {
            self.is_full = true;
            return Err(ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}
