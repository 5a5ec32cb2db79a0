//! Where the bars of a chart stand: horizontal places as shares of the width, so that a chart fits
//! any screen, and vertical ones in pixels, so that its text keeps its size.

use super::text::{place, time};
use flashtune::config::Config;
use serde::Serialize;

/// Pixels of a row: a line of text and a bar below it.
const ROW: usize = 36;
/// Pixels above the first row, for the words at the limit's line.
const HEAD: usize = 20;
/// More bars are no help; the table below the chart has all candidates.
const MOST_BARS: usize = 12;

/// A measured time, as a chart shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// None where only the time was kept.
    pub config: Option<Config>,
    /// As it would be in the laps in which the winner took its median.
    pub us: f64,
    pub median_us: f64,
    pub utilisation: Option<f64>,
    pub is_winner: bool,
    pub is_default: bool,
    pub is_runner_up: bool,
    pub is_earlier: bool,
    /// It dropped out early, so its time may be odd.
    pub was_brief: bool,
}

#[derive(Serialize)]
pub struct Chart {
    height: usize,
    bars: Vec<Bar>,
    limit: Option<Limit>,
    /// Measured candidates that the chart leaves out.
    left_out: usize,
    description: String,
}

#[derive(Serialize)]
struct Bar {
    kind: &'static str,
    is_strong: bool,
    label: String,
    title: String,
    time: String,
    width: String,
    text_y: usize,
    bar_y: usize,
}

#[derive(Serialize)]
struct Limit {
    x: String,
    /// Where the words stand beside the line.
    anchor: &'static str,
    dx: i32,
    label: String,
}

/// The chart of one problem's candidates, in their order. `limit_us` is the least possible time.
pub fn of_candidates(timed: &[Timed], limit_us: Option<f64>) -> Option<Chart> {
    let winner = timed.iter().find(|timed| timed.is_winner).and_then(|timed| timed.config.clone());
    let is_shown = |(index, timed): &(usize, &Timed)| *index < MOST_BARS || timed.is_winner || timed.is_default;
    let shown: Vec<&Timed> = timed.iter().enumerate().filter(is_shown).map(|(_, timed)| timed).collect();
    let longest = shown.iter().map(|timed| timed.us).fold(0.0, f64::max);
    let fastest = shown.iter().map(|timed| timed.us).min_by(f64::total_cmp)?;
    let bars: Vec<Bar> = (0..).zip(&shown).map(|(row, timed)| bar(row, timed, winner.as_ref(), longest)).collect();
    let limit = limit_us.filter(|us| *us <= longest).map(|us| {
        let is_left = us < longest / 2.0;
        Limit {
            x: place(us / longest),
            anchor: if is_left { "start" } else { "end" },
            dx: if is_left { 5 } else { -5 },
            label: format!("limit {}", time(us)),
        }
    });
    Some(Chart {
        height: HEAD + ROW * bars.len(),
        left_out: timed.len() - shown.len(),
        description: format!("{} candidates from {} to {}", shown.len(), time(fastest), time(longest)),
        bars,
        limit,
    })
}

fn bar(row: usize, timed: &Timed, winner: Option<&Config>, longest: f64) -> Bar {
    let (kind, role) = match (timed.is_winner, timed.is_default) {
        (true, true) => ("winner", "winner, the default"),
        (true, false) => ("winner", "winner"),
        (false, true) => ("default", "default"),
        (false, false) if timed.was_brief => ("brief", "dropped early"),
        (false, false) if timed.is_runner_up => ("other", "runner-up"),
        (false, false) => ("other", ""),
    };
    let name = timed.config.as_ref().map_or("its config was not kept".to_owned(), |config| match winner {
        Some(winner) if !timed.is_winner => difference(config, winner),
        _ => config.to_string(),
    });
    let label = match (timed.is_winner, role) {
        // The page has the winner's config above the chart.
        (true, _) => role.to_owned(),
        (false, "") => name.clone(),
        (false, role) => format!("{role}: {name}"),
    };
    let full = timed.config.as_ref().map_or(name.clone(), Config::to_string);
    Bar {
        kind,
        is_strong: timed.is_winner || timed.is_default,
        label,
        title: format!("{full}: {}", time(timed.us)),
        time: time(timed.us),
        width: place(timed.us / longest),
        text_y: HEAD + ROW * row + 13,
        bar_y: HEAD + ROW * row + 18,
    }
}

/// The knobs in which a config differs from the winner, or all of another family's.
fn difference(config: &Config, winner: &Config) -> String {
    if config.family != winner.family {
        return config.to_string();
    }
    let differs = |(knob, value): &(&str, u32)| winner.get(knob) != Some(*value);
    let knobs: Vec<String> =
        config.knobs.iter().filter(differs).map(|(knob, value)| format!("{knob}={value}")).collect();
    if knobs.is_empty() { config.to_string() } else { knobs.join(" ") }
}

#[derive(Serialize)]
pub struct Overview {
    height: usize,
    base_y: usize,
    top: String,
    columns: Vec<Column>,
    description: String,
}

#[derive(Serialize)]
struct Column {
    x: String,
    width: String,
    y: String,
    height: String,
    title: String,
}

/// Pixels of the overview's highest column, and above it.
const OVERVIEW: f64 = 120.0;
const OVERVIEW_HEAD: usize = 18;
/// Fewer columns are as narrow as these, and leave the rest of the width empty.
const FEWEST_COLUMNS: usize = 16;
/// A problem whose default stayed is a line of this height.
const LEAST_COLUMN: f64 = 2.0;

/// How many times faster the winners are than the defaults, largest first: (problem, ratio).
pub fn of_ratios(mut ratios: Vec<(String, f64)>) -> Option<Overview> {
    ratios.sort_by(|a, b| b.1.total_cmp(&a.1));
    let most = ratios.first()?.1;
    // One and the same scale for small gains, so that noise does not look like gain.
    let top = most.max(1.1);
    let count = ratios.len().max(FEWEST_COLUMNS) as f64;
    let columns = ratios.iter().enumerate().map(|(index, (name, ratio))| {
        let height = (OVERVIEW * (ratio - 1.0) / (top - 1.0)).clamp(LEAST_COLUMN, OVERVIEW);
        Column {
            x: place(index as f64 / count),
            width: place(0.82 / count),
            y: format!("{:.1}", OVERVIEW_HEAD as f64 + OVERVIEW - height),
            height: format!("{height:.1}"),
            title: format!("{name}: {ratio:.3}"),
        }
    });
    Some(Overview {
        height: OVERVIEW_HEAD + OVERVIEW as usize + 18,
        base_y: OVERVIEW_HEAD + OVERVIEW as usize,
        top: format!("{top:.2}"),
        description: format!("{} problems, from {most:.2} to {:.2}", ratios.len(), ratios.last()?.1),
        columns: columns.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtune::config::Family;

    fn timed(block_m: u32, us: f64) -> Timed {
        let config = Config::new(Family::Cpu, [("block_m", block_m), ("block_n", 64)]);
        Timed {
            config: Some(config),
            us,
            median_us: us,
            utilisation: None,
            is_winner: false,
            is_default: false,
            is_runner_up: false,
            is_earlier: false,
            was_brief: false,
        }
    }

    #[test]
    fn bars_are_as_long_as_times_and_the_default_is_never_left_out() {
        let mut all: Vec<Timed> = (1..=30).map(|i| timed(i, f64::from(i) * 10.0)).collect();
        all[0].is_winner = true;
        all[29].is_default = true;
        let chart = of_candidates(&all, Some(150.0)).unwrap();
        assert_eq!((chart.bars.len(), chart.left_out), (MOST_BARS + 1, 17));
        assert_eq!(chart.bars[0].label, "winner");
        assert_eq!(chart.bars[12].label, "default: block_m=30");
        assert_eq!((chart.bars[12].width.as_str(), chart.bars[0].width.as_str()), ("100.00%", "3.33%"));
        assert_eq!(chart.limit.unwrap().x, "50.00%");
        assert!(of_candidates(&[], None).is_none());
        assert!(of_candidates(&all, Some(301.0)).unwrap().limit.is_none(), "it would lie outside");
    }

    #[test]
    fn columns_are_sorted_and_stay_inside() {
        let overview = of_ratios(vec![("a".into(), 0.9), ("b".into(), 2.0), ("c".into(), 1.5)]).unwrap();
        let heights: Vec<&str> = overview.columns.iter().map(|column| column.height.as_str()).collect();
        assert_eq!(heights, ["120.0", "60.0", "2.0"]);
        assert_eq!(of_ratios(vec![("a".into(), 1.01)]).unwrap().columns[0].height, "12.0");
    }
}
