//! How the report writes figures, days and problems.

use flashtune::plan::key::Class;
use flashtune::problem::{Causal, Pass, Problem};

/// Microseconds with four digits, in the unit that people read best.
pub fn time(us: f64) -> String {
    let (value, unit) = match us {
        _ if us < 1e3 => (us, "us"),
        _ if us < 1e6 => (us / 1e3, "ms"),
        _ => (us / 1e6, "s"),
    };
    format!("{} {unit}", digits(value))
}

/// Four digits, or all before the point.
pub fn digits(value: f64) -> String {
    let decimals = match value.abs() {
        v if v < 10.0 => 3,
        v if v < 100.0 => 2,
        v if v < 1000.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A position or length in an SVG, as a percentage of its width.
pub fn place(share: f64) -> String {
    format!("{:.2}%", (100.0 * share).clamp(0.0, 100.0))
}

/// The day of a time in seconds since 1970, in UTC: `2026-11-23`. None past the year 9999.
pub fn day(seconds: u64) -> Option<String> {
    let seconds = libc::time_t::try_from(seconds).ok()?;
    // SAFETY: `tm` is plain numbers and a pointer that only localtime fills in.
    let mut fields: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live values, and gmtime_r keeps neither.
    let is_done = unsafe { !libc::gmtime_r(&seconds, &mut fields).is_null() };
    let year = i64::from(fields.tm_year) + 1900;
    (is_done && year <= 9999).then(|| format!("{year:04}-{:02}-{:02}", fields.tm_mon + 1, fields.tm_mday))
}

/// The problem in a few words: `forward bf16, head dim 128, causal` and its shape.
pub fn problem(problem: &Problem) -> (String, String) {
    let pass = match problem.pass {
        Pass::Forward => "forward",
        Pass::Backward => "backward",
    };
    let head_dim = match problem.head_dim == problem.head_dim_v {
        true => format!("head dim {}", problem.head_dim),
        false => format!("head dims {} and {}", problem.head_dim, problem.head_dim_v),
    };
    let mask = match problem.causal {
        Causal::None => None,
        Causal::BottomRight => Some("causal"),
        Causal::TopLeft => Some("causal from the top left"),
    };
    let mut parts = vec![format!("{pass} {}", problem.dtype.name()), head_dim];
    parts.extend(mask.map(str::to_owned));
    parts.extend(problem.dropout.then(|| "dropout".to_owned()));
    parts.extend(Class::of(problem).feature_words());
    let heads = match problem.num_heads_q == problem.num_heads_kv {
        true if problem.num_heads_q == 1 => "1 head".to_owned(),
        true => format!("{} heads", problem.num_heads_q),
        false => format!("{} heads over {} of K/V", problem.num_heads_q, problem.num_heads_kv),
    };
    let lengths = match problem.seqlen_q == problem.seqlen_k {
        true => format!("length {}", problem.seqlen_q),
        false if problem.seqlen_q == 1 => format!("1 query, {} keys", problem.seqlen_k),
        false => format!("{} queries, {} keys", problem.seqlen_q, problem.seqlen_k),
    };
    (parts.join(", "), format!("batch {}, {heads}, {lengths}", problem.batch_size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune::problem::Dtype;

    #[test]
    fn times_have_the_unit_that_fits() {
        assert_eq!(
            [0.5, 12.34, 999.96, 1188.0, 2.5e6].map(time),
            ["0.500 us", "12.34 us", "1000.0 us", "1.188 ms", "2.500 s"]
        );
    }

    #[test]
    fn days_are_those_of_utc() {
        assert_eq!(day(0).as_deref(), Some("1970-01-01"));
        assert_eq!(day(1_709_251_199).as_deref(), Some("2024-02-29"));
        assert_eq!(day(u64::MAX), None);
        assert_eq!(day(i64::MAX as u64), None);
    }

    #[test]
    fn a_problem_is_told_with_its_features() {
        let dense = Problem::dense(Pass::Forward, Dtype::Bf16, 1, 32, 4096, 128);
        let told = problem(&Problem { num_heads_kv: 8, causal: Causal::BottomRight, dropout: true, ..dense });
        assert_eq!(told.0, "forward bf16, head dim 128, causal, dropout");
        assert_eq!(told.1, "batch 1, 32 heads over 8 of K/V, length 4096");
        let features =
            flashtune::problem::Features { paged: Some(16), softcap: true, ..flashtune::problem::Features::NONE };
        assert_eq!(
            problem(&Problem { features, seqlen_q: 1, ..dense }).0,
            "forward bf16, head dim 128, softcap, page16"
        );
    }
}
