//! Samples of one candidate's run time and what is read from them: median, spread, and the noise of the median.
//!
//! Pure arithmetic. How samples are taken (interleaved, cold) is `search`'s and `rig`'s.

use std::time::Duration;

#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// Microseconds, in the order in which they were taken.
    us: Vec<f64>,
}

impl Samples {
    pub fn push(&mut self, sample: Duration) {
        self.us.push(sample.as_secs_f64() * 1e6);
    }

    pub fn count(&self) -> usize {
        self.us.len()
    }

    /// Infinite where nothing was measured, so that it is never the best.
    pub fn median_us(&self) -> f64 {
        quantile(&self.us, 0.5)
    }

    /// Half the interquartile range over the median.
    pub fn spread(&self) -> f64 {
        spread(&self.us)
    }
}

/// Fewer pairs than this say nothing of their spread.
const FEWEST_PAIRS: usize = 4;

/// The default keeps its place unless it is beaten by more than this share of its time.
const MARGIN: f64 = 0.02;

/// How `a` compares with `b`, the median over the turns in which both were sampled; NaN where there was none.
pub fn ratio(a: &Samples, b: &Samples) -> f64 {
    let ratios = ratios(a, b);
    if ratios.is_empty() { f64::NAN } else { quantile(&ratios, 0.5) }
}

fn ratios(a: &Samples, b: &Samples) -> Vec<f64> {
    a.us.iter().zip(&b.us).map(|(a, b)| a / b).collect()
}

/// Whether `challenger` is faster than `default` by more than the margin and twice the noise.
///
/// Both were sampled in turn, so the ratio of neighbours is free of what changes slowly (clock, heat); the noise is the
/// standard error of the ratios' median. For a normal distribution the standard deviation is half the interquartile
/// range / 0.6745, and the median's standard error sqrt(pi / 2) times the mean's.
pub fn beats(challenger: &Samples, default: &Samples) -> bool {
    let ratios = ratios(challenger, default);
    let gain = 1.0 - quantile(&ratios, 0.5);
    let noise = spread(&ratios) / 0.6745 * (std::f64::consts::FRAC_PI_2 / ratios.len() as f64).sqrt();
    ratios.len() >= FEWEST_PAIRS && gain > MARGIN.max(2.0 * noise)
}

fn spread(values: &[f64]) -> f64 {
    (quantile(values, 0.75) - quantile(values, 0.25)) / (2.0 * quantile(values, 0.5))
}

/// Linear interpolation between the two values around the quantile; infinite where there are none.
fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::INFINITY };
    let position = q * last as f64;
    let (low, high) = (position.floor() as usize, position.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * position.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(us: impl IntoIterator<Item = u64>) -> Samples {
        us.into_iter().fold(Samples::default(), |mut all, us| {
            all.push(Duration::from_micros(us));
            all
        })
    }

    #[test]
    fn median_and_spread_do_not_see_an_outlier() {
        let all = samples([100, 102, 98, 101, 99, 90_000]);
        assert_eq!(all.median_us(), 100.5);
        assert!(all.spread() < 0.02, "{}", all.spread());
    }

    #[test]
    fn a_clear_winner_beats_the_default() {
        assert!(beats(&samples([90, 91, 90, 89, 90]), &samples([100, 101, 100, 99, 100])));
    }

    #[test]
    fn one_percent_is_not_enough() {
        assert!(!beats(&samples([990; 20]), &samples([1000; 20])));
        assert!(beats(&samples([970; 20]), &samples([1000; 20])));
    }

    #[test]
    fn noise_keeps_the_default() {
        let (default, faster) = ([60, 140, 90, 130, 70, 95], [95, 60, 130, 60, 125, 80]);
        assert!(samples(faster).median_us() < samples(default).median_us());
        assert!(!beats(&samples(faster), &samples(default)));
    }

    #[test]
    fn what_slows_both_alike_is_no_noise() {
        let drift = |us: u64| (0..20).map(move |turn| us + us * turn / 10);
        assert!(beats(&samples(drift(950)), &samples(drift(1000))));
    }

    #[test]
    fn few_samples_never_beat_the_default() {
        assert!(!beats(&samples([10, 10, 10]), &samples([100, 100, 100, 100])));
        assert!(!beats(&Samples::default(), &samples([100, 100, 100, 100])));
    }
}
