//! Check: one line of the doctor's report, for people and as JSON.

use serde::Serialize;
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// It is not there. Others may do without it.
    Missing,
    /// It is there and cannot work.
    Wrong,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub check: &'static str,
    pub status: Status,
    pub fact: String,
    /// The command that mends it; null if nothing needs mending, or no command does.
    pub mend: Option<String>,
}

impl Check {
    /// The fact may quote a message of several lines; a check is one line.
    fn new(check: &'static str, status: Status, fact: impl fmt::Display, mend: Option<String>) -> Check {
        let fact = fact.to_string().lines().map(str::trim).collect::<Vec<_>>().join(" ");
        Check { check, status, fact, mend }
    }

    pub fn ok(check: &'static str, fact: impl fmt::Display) -> Check {
        Check::new(check, Status::Ok, fact, None)
    }

    pub fn missing(check: &'static str, fact: impl fmt::Display, mend: Option<String>) -> Check {
        Check::new(check, Status::Missing, fact, mend)
    }

    pub fn wrong(check: &'static str, fact: impl fmt::Display, mend: Option<String>) -> Check {
        Check::new(check, Status::Wrong, fact, mend)
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self.status {
            Status::Ok => "ok",
            Status::Missing => "missing",
            Status::Wrong => "wrong",
        };
        write!(f, "{status:<8}{}: {}", self.check, self.fact)?;
        self.mend.as_ref().map_or(Ok(()), |mend| write!(f, "; mend: {mend}"))
    }
}

/// A word as a shell reads it back.
pub fn quoted(word: impl fmt::Display) -> String {
    let word = word.to_string();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word,
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_quoted_so_that_a_shell_reads_one_word() {
        assert_eq!(quoted("/a/b-1.pack"), "/a/b-1.pack");
        assert_eq!(quoted("/my packs/it's"), r"'/my packs/it'\''s'");
    }

    #[test]
    fn a_check_is_one_line_whatever_its_message() {
        let check = Check::wrong("gpu", "refused:\n  line 1\n  line 2", Some("sudo reboot".to_owned()));
        assert_eq!(check.to_string(), "wrong   gpu: refused: line 1 line 2; mend: sudo reboot");
    }
}
