//! The progress of a long run on standard error: a bar on a terminal, plain lines elsewhere.

use flashtune::tune::Progress;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

pub struct Display {
    /// None if standard error is no terminal.
    bar: Option<ProgressBar>,
    total: usize,
}

impl Display {
    pub fn new(total: usize) -> Display {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total as u64);
            let style = ProgressStyle::with_template("[{elapsed_precise}] {bar:24} {pos}/{len} {wide_msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Display { bar, total }
    }

    pub fn step(&self, name: &str, progress: &Progress) {
        let Some(bar) = &self.bar else { return };
        let best =
            progress.best.map_or(String::new(), |(_, time)| format!(", best {:.1} us", time.as_secs_f64() * 1e6));
        let failed = if progress.failed == 0 { String::new() } else { format!(", {} failed", progress.failed) };
        bar.set_message(format!(
            "{name}: {} {}/{}{best}{failed}",
            progress.phase.name(),
            progress.done,
            progress.total
        ));
    }

    /// Prints the line of a finished problem above the bar.
    pub fn finish_one(&self, index: usize, line: &str) {
        match &self.bar {
            Some(bar) => {
                bar.println(line);
                bar.set_position(index as u64 + 1);
            }
            None => eprintln!("[{}/{}] {line}", index + 1, self.total),
        }
    }

    /// Prints a line above the bar.
    pub fn line(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => eprintln!("{line}"),
        }
    }

    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
