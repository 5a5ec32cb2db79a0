//! Knobs: the typed config of one pass of a family, and the constraints on it.
//!
//! `config::Config` is the text form, which records, the command line and templates share; it may
//! lack a knob or name one that nobody knows. A family reads it once, through `Knobs::of`, and
//! computes with the typed struct from there on. `knobs!` declares a struct, the names, their
//! meaning and their values in one list.

use crate::config::{Config, Family};
use crate::device::Device;
use crate::problem::Problem;

/// A named number of a config. Adding a value here adds it to the space; records name it by `name`.
pub struct Knob {
    pub name: &'static str,
    /// What it is, with its unit, in a few words.
    pub meaning: &'static str,
    pub values: &'static [u32],
    /// The value that a config has which is older than the knob; None for a knob that no config
    /// lacks.
    pub of_older: Option<u32>,
}

/// A condition that every config of a pass meets; the first one that fails is why a config is
/// rejected.
pub struct Constraint<K: 'static> {
    pub name: &'static str,
    /// Why: the hardware's or the kernel's reason.
    pub reason: &'static str,
    pub holds: fn(&Problem, &K, &Device) -> bool,
}

/// The typed knobs of one pass of a family; `knobs!` implements it.
pub trait Knobs: Copy + PartialEq + 'static {
    const FAMILY: Family;
    /// In the order of the struct's fields.
    const LIST: &'static [Knob];

    /// `values` has one value for each knob of `LIST`.
    fn from_values(values: &[u32]) -> Self;

    fn values(&self) -> Vec<u32>;

    /// Reads the text form. A knob that is missing or unknown is an error; a value that is not
    /// listed is none.
    fn of(config: &Config) -> Result<Self, String> {
        let value = |knob: &Knob| config.knobs.get(knob.name).ok_or_else(|| missing(config, knob));
        let values: Result<Vec<u32>, String> = Self::LIST.iter().map(value).collect();
        // As many names as knobs, each of which has one: none is unknown.
        if values.is_err() || config.knobs.names().count() != Self::LIST.len() {
            refuse_unknown(config, Self::LIST)?;
        }
        Ok(Self::from_values(&values?))
    }

    /// Reads the text form. A value that is not listed is an error too.
    fn of_listed(config: &Config) -> Result<Self, String> {
        match Self::of(config) {
            Ok(knobs) if knobs.is_listed() => Ok(knobs),
            _ => Err(refusal(config, Self::LIST)),
        }
    }

    /// The text form.
    fn to_config(self) -> Config {
        Config::new(Self::FAMILY, Self::LIST.iter().map(|knob| knob.name).zip(self.values()))
    }

    /// Whether every value is one of its knob's.
    fn is_listed(&self) -> bool {
        Self::LIST.iter().zip(self.values()).all(|(knob, value)| knob.values.contains(&value))
    }
}

/// Why a text form does not have the knobs of a list, each at one of its values, and no other.
fn refusal(config: &Config, knobs: &[Knob]) -> String {
    let of_knob = |knob: &Knob| match config.knobs.get(knob.name) {
        None => Some(missing(config, knob)),
        Some(value) if !knob.values.contains(&value) => {
            Some(format!("{} is {value}; it must be one of {:?}", knob.name, knob.values))
        }
        Some(_) => None,
    };
    let unknown = refuse_unknown(config, knobs).err();
    unknown.or_else(|| knobs.iter().find_map(of_knob)).unwrap_or_default()
}

/// The text form with the knobs that it is too old to name.
pub fn with_younger_knobs(mut config: Config, knobs: &[Knob]) -> Config {
    for knob in knobs {
        if let (Some(value), None) = (knob.of_older, config.knobs.get(knob.name)) {
            config.knobs.insert(knob.name, value);
        }
    }
    config
}

fn refuse_unknown(config: &Config, knobs: &[Knob]) -> Result<(), String> {
    match config.knobs.names().find(|name| !knobs.iter().any(|knob| knob.name == *name)) {
        None => Ok(()),
        Some(unknown) => {
            let known: Vec<_> = knobs.iter().map(|knob| knob.name).collect();
            Err(format!("{unknown} is not a knob of {}; its knobs are {}", config.family.name(), known.join(", ")))
        }
    }
}

fn missing(config: &Config, knob: &Knob) -> String {
    format!("{} ({}) is missing from {config}", knob.name, knob.meaning)
}

/// Declares the typed knobs of a pass: `name: "meaning" in [values]`. A knob that is added to a
/// pass with records is `name or VALUE: …`: the records were measured with this value.
macro_rules! knobs {
    (
        $(#[$doc:meta])*
        pub struct $name:ident of $family:ident {
            $($knob:ident $(or $of_older:literal)?: $meaning:literal in $values:expr,)+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $(#[doc = $meaning] pub $knob: u32,)+
        }

        impl $crate::family::knob::Knobs for $name {
            const FAMILY: $crate::config::Family = $crate::config::Family::$family;
            const LIST: &'static [$crate::family::knob::Knob] = &[
                $($crate::family::knob::Knob {
                    name: stringify!($knob),
                    meaning: $meaning,
                    values: &$values,
                    of_older: [$($of_older)?].first().copied(),
                },)+
            ];

            fn from_values(values: &[u32]) -> Self {
                let &[$($knob),+] = values else { panic!("{} values are not one for each knob", values.len()) };
                $name { $($knob),+ }
            }

            fn values(&self) -> Vec<u32> {
                vec![$(self.$knob),+]
            }
        }
    };
}
pub(super) use knobs;

#[cfg(test)]
mod tests {
    use super::*;

    knobs! {
        pub struct Pair of Cpu {
            rows: "rows of a tile" in [16, 32],
            keys: "keys of a tile" in [64],
        }
    }

    knobs! {
        pub struct Triple of Cpu {
            rows: "rows of a tile" in [16, 32],
            keys: "keys of a tile" in [64],
            splits or 1: "splits of the keys" in [1, 2],
        }
    }

    fn config(knobs: &[(&'static str, u32)]) -> Config {
        Config::new(Family::Cpu, knobs.iter().copied())
    }

    #[test]
    fn the_text_form_and_the_typed_one_hold_the_same() {
        let text = config(&[("keys", 64), ("rows", 32)]);
        let typed = Pair::of(&text).unwrap();
        assert_eq!((typed, typed.to_config()), (Pair { rows: 32, keys: 64 }, text));
    }

    #[test]
    fn a_missing_or_unknown_knob_is_an_error_that_names_it() {
        let both = [config(&[("rows", 16)]), config(&[("rows", 16), ("kyes", 64)])].map(|text| {
            let error = Pair::of(&text).unwrap_err();
            assert_eq!(Pair::of_listed(&text), Err(error.clone()));
            error
        });
        assert_eq!(both[0], "keys (keys of a tile) is missing from cpu rows=16");
        assert_eq!(both[1], "kyes is not a knob of cpu; its knobs are rows, keys");
    }

    #[test]
    fn a_config_older_than_a_knob_gets_the_value_that_it_was_measured_with() {
        let older = config(&[("rows", 16), ("keys", 64)]);
        let read = |config: &Config| Triple::of(&with_younger_knobs(config.clone(), Triple::LIST)).unwrap();
        assert_eq!(read(&older).splits, 1);
        assert_eq!(read(&older.clone().with("splits", 2)).splits, 2);
        let lacks_another = with_younger_knobs(config(&[("rows", 16)]), Triple::LIST);
        assert!(Triple::of(&lacks_another).unwrap_err().starts_with("keys"));
    }

    #[test]
    fn a_value_that_is_not_listed_is_read_and_does_not_pass() {
        let text = config(&[("rows", 17), ("keys", 64)]);
        let typed = Pair::of(&text).unwrap();
        assert_eq!((typed.rows, typed.is_listed()), (17, false));
        assert_eq!(Pair::of_listed(&text).unwrap_err(), "rows is 17; it must be one of [16, 32]");
    }
}
