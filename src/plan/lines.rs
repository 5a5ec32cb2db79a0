//! Lines: a file of records read line by line, so that its size does not matter to memory.

use crate::files;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Result};
use std::path::Path;

/// A record has about 700 bytes.
const MAX_LINE_BYTES: u64 = 64 << 10;

pub struct Lines {
    file: BufReader<File>,
    number: usize,
}

impl Lines {
    pub fn open(path: &Path) -> Result<Lines> {
        Ok(Lines { file: BufReader::new(files::open(path)?), number: 0 })
    }

    /// The next line that is not blank, with its number; None at the end. The inner error says why
    /// a line is no text.
    pub fn next(&mut self) -> Result<Option<(usize, std::result::Result<String, String>)>> {
        loop {
            let mut line = Vec::new();
            (&mut self.file).take(MAX_LINE_BYTES).read_until(b'\n', &mut line)?;
            if line.is_empty() {
                return Ok(None);
            }
            self.number += 1;
            if !line.ends_with(b"\n") && line.len() as u64 == MAX_LINE_BYTES {
                self.file.skip_until(b'\n')?;
                return Ok(Some((self.number, Err(format!("it has more than {MAX_LINE_BYTES} bytes")))));
            }
            let text = String::from_utf8(line).map_err(|_| "it is not UTF-8 text".to_owned());
            if !text.as_ref().is_ok_and(|text| text.trim().is_empty()) {
                return Ok(Some((self.number, text)));
            }
        }
    }
}
