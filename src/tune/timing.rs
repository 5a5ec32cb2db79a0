//! Samples of one candidate's run time and what is read from them: median, spread, and the noise of the median.
//!
//! Pure arithmetic. How samples are taken (interleaved, cold) is `search`'s and `rig`'s.

use std::time::Duration;

#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// Microseconds, ascending.
    sorted_us: Vec<f64>,
}

impl Samples {
    pub fn push(&mut self, sample: Duration) {
        let us = sample.as_secs_f64() * 1e6;
        let at = self.sorted_us.partition_point(|other| *other < us);
        self.sorted_us.insert(at, us);
    }

    pub fn len(&self) -> usize {
        self.sorted_us.len()
    }

    /// Infinite where nothing was measured, so that it is never the best.
    pub fn median_us(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Half the interquartile range over the median.
    pub fn spread(&self) -> f64 {
        (self.quantile(0.75) - self.quantile(0.25)) / (2.0 * self.median_us())
    }

    /// Standard error of the median over the median. For a normal distribution the standard deviation is
    /// half the interquartile range / 0.6745 and the median's standard error is sqrt(pi / 2) times the mean's.
    /// Infinite below `FEWEST_TO_JUDGE` samples: their spread says nothing.
    pub fn noise(&self) -> f64 {
        match self.len() {
            0..FEWEST_TO_JUDGE => f64::INFINITY,
            n => self.spread() / 0.6745 * (std::f64::consts::FRAC_PI_2 / n as f64).sqrt(),
        }
    }

    /// Linear interpolation between the two samples around the quantile.
    fn quantile(&self, q: f64) -> f64 {
        let Some(last) = self.sorted_us.len().checked_sub(1) else { return f64::INFINITY };
        let position = q * last as f64;
        let (low, high) = (position.floor() as usize, position.ceil() as usize);
        self.sorted_us[low] + (self.sorted_us[high] - self.sorted_us[low]) * position.fract()
    }
}

pub const FEWEST_TO_JUDGE: usize = 4;

/// The default keeps its place unless it is beaten by more than this share of its time.
pub const MARGIN: f64 = 0.02;

/// Whether `challenger` is faster than `default` by more than the margin and twice the noise of the difference.
pub fn beats(challenger: &Samples, default: &Samples) -> bool {
    let gain = 1.0 - challenger.median_us() / default.median_us();
    let noise = challenger.noise().hypot(default.noise());
    gain > MARGIN.max(2.0 * noise)
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
        let noisy = [60, 140, 90, 130, 70, 95];
        assert!(!beats(&samples(noisy), &samples(noisy.map(|us| us + 8))));
    }

    #[test]
    fn few_samples_never_beat_the_default() {
        assert!(!beats(&samples([10, 10, 10]), &samples([100, 100, 100, 100])));
        assert!(!beats(&Samples::default(), &samples([100, 100, 100, 100])));
    }
}
