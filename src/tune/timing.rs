//! Samples of one candidate's run time, and their median, spread and noise.
//!
//! Pure arithmetic. `search` and `rig` take the samples (interleaved, cold).

use super::utilisation::Floor;
use crate::backend::Elapsed;

#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// By lap, ascending.
    all: Vec<(usize, Elapsed)>,
}

impl Samples {
    /// A lap is one sample of every survivor. Laps are counted over a whole search and only grow.
    pub fn push(&mut self, lap: usize, sample: Elapsed) {
        self.all.push((lap, sample));
    }

    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Infinite if nothing was measured, so that it is never the best.
    pub fn median_us(&self) -> f64 {
        quantile(&self.values(), 0.5)
    }

    /// Half the interquartile range over the median.
    pub fn spread(&self) -> f64 {
        spread(&self.values())
    }

    /// The median of each sample's floor over its time; None if no sample's floor is known.
    pub fn utilisation(&self, floor: Option<Floor>) -> Option<f64> {
        let shares: Vec<f64> = self.all.iter().filter_map(|(_, elapsed)| floor?.over(elapsed)).collect();
        (!shares.is_empty()).then(|| quantile(&shares, 0.5))
    }

    fn values(&self) -> Vec<f64> {
        self.all.iter().map(|(_, elapsed)| us(elapsed)).collect()
    }
}

fn us(elapsed: &Elapsed) -> f64 {
    elapsed.time.as_secs_f64() * 1e6
}

/// Fewer pairs than this do not show their spread.
const FEWEST_PAIRS: usize = 4;

/// The default keeps its place unless it is beaten by more than this share of its time.
pub const MARGIN: f64 = 0.02;

/// The ratio of `a` to `b`: the median over the laps in which both were sampled; NaN if there is
/// none.
pub fn ratio(a: &Samples, b: &Samples) -> f64 {
    let ratios = ratios(a, b);
    if ratios.is_empty() { f64::NAN } else { quantile(&ratios, 0.5) }
}

fn ratios(a: &Samples, b: &Samples) -> Vec<f64> {
    let of_lap = |lap: usize| b.all.binary_search_by_key(&lap, |(lap, _)| *lap).ok().map(|at| us(&b.all[at].1));
    a.all.iter().filter_map(|(lap, elapsed)| Some(us(elapsed) / of_lap(*lap)?)).collect()
}

/// Whether `challenger` is faster than `default` by more than the margin and twice the noise.
///
/// Both were sampled in each lap, so slow changes (clock, heat) cancel in the ratio of
/// neighbours. The noise is the standard error of the ratios' median. For a normal distribution the
/// standard deviation is half the interquartile range / 0.6745, and the median's standard error
/// sqrt(pi / 2) times the mean's.
pub fn beats(challenger: &Samples, default: &Samples) -> bool {
    let ratios = ratios(challenger, default);
    let gain = 1.0 - quantile(&ratios, 0.5);
    let noise = spread(&ratios) / 0.6745 * (std::f64::consts::FRAC_PI_2 / ratios.len() as f64).sqrt();
    ratios.len() >= FEWEST_PAIRS && gain > MARGIN.max(2.0 * noise)
}

fn spread(values: &[f64]) -> f64 {
    (quantile(values, 0.75) - quantile(values, 0.25)) / (2.0 * quantile(values, 0.5))
}

/// Linear interpolation between the two values around the quantile; infinite if there are no
/// values.
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
    use std::time::Duration;

    fn sample(us: u64) -> Elapsed {
        Elapsed { time: Duration::from_micros(us), sm_clock_hz: None }
    }

    fn samples(us: impl IntoIterator<Item = u64>) -> Samples {
        us.into_iter().enumerate().fold(Samples::default(), |mut all, (lap, us)| {
            all.push(lap, sample(us));
            all
        })
    }

    #[test]
    fn utilisation_uses_the_clock_of_each_sample() {
        // The same cycles at a clock that falls.
        let mut all = Samples::default();
        for (lap, ghz) in [2.0, 1.6, 1.0].into_iter().enumerate() {
            let time = Duration::from_secs_f64(1000.0 / (ghz * 1e9));
            all.push(lap, Elapsed { time, sm_clock_hz: Some(ghz * 1e9) });
        }
        assert!((all.utilisation(Some(Floor::Cycles(700.0))).unwrap() - 0.7).abs() < 1e-3);
        assert_eq!(all.utilisation(None), None);
        assert_eq!(samples([100]).utilisation(Some(Floor::Cycles(700.0))), None);
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
        let drift = |us: u64| (0..20).map(move |lap| us + us * lap / 10);
        assert!(beats(&samples(drift(950)), &samples(drift(1000))));
    }

    #[test]
    fn only_samples_of_the_same_lap_are_compared() {
        let mut late = Samples::default();
        // It was measured while everything took twice as long, and was faster than the default
        // then.
        (10..20).for_each(|lap| late.push(lap, sample(190)));
        let default = samples((0..20).map(|lap| if lap < 10 { 100 } else { 200 }));
        assert_eq!(ratio(&late, &default), 0.95);
        assert!(beats(&late, &default));
        assert!(ratio(&samples([1, 2]), &late).is_nan());
    }

    #[test]
    fn few_samples_never_beat_the_default() {
        assert!(!beats(&samples([10, 10, 10]), &samples([100, 100, 100, 100])));
        assert!(!beats(&Samples::default(), &samples([100, 100, 100, 100])));
    }
}
