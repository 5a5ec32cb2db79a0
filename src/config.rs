//! Config: *how* a problem is solved, as text: a kernel family and named integers, never an index.
//!
//! Records, the command line and templates share this form, `sm80 block_m=128 block_n=64 …`, with
//! sorted names. A Config keeps whatever was read, including the knobs of another version. `family`
//! declares the names and their legal values, checks them, and computes with typed knobs alone.

use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// The host: `cpu/`.
    Cpu,
    /// `mma.sync`, `ldmatrix`, `cp.async`: every NVIDIA GPU from Ampere on.
    Sm80,
    /// `wgmma`, TMA, warp specialisation: compute capability 9.0.
    Sm90,
    /// The same for Q, K and V in e4m3: forward.
    Sm90Fp8,
    /// Few queries over many keys, split over CTAs: forward, with sm80's instructions.
    Decode,
}

impl Family {
    pub const fn name(self) -> &'static str {
        match self {
            Family::Cpu => "cpu",
            Family::Sm80 => "sm80",
            Family::Sm90 => "sm90",
            Family::Sm90Fp8 => "sm90fp8",
            Family::Decode => "decode",
        }
    }

    /// The suffix that the kernels' target adds to the architecture: sm_90a, which `wgmma` and
    /// `setmaxnreg` need.
    pub const fn target_suffix(self) -> &'static str {
        match self {
            Family::Cpu | Family::Sm80 | Family::Decode => "",
            Family::Sm90 | Family::Sm90Fp8 => "a",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Config {
    pub family: Family,
    #[serde(flatten)]
    pub knobs: NamedNumbers,
}

/// Numbers by name, in the order of the names. A lookup makes, copies and compares some hundred
/// configs of up to fifteen knobs. A list takes one allocation for a config, and a name that the
/// program declares takes none (docs/tuning/choice.md#the-time-of-a-lookup).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamedNumbers(Vec<(Cow<'static, str>, u32)>);

impl NamedNumbers {
    fn place(&self, name: &str) -> Result<usize, usize> {
        self.0.binary_search_by(|(other, _)| other.as_ref().cmp(name))
    }

    pub fn get(&self, name: &str) -> Option<u32> {
        // A family asks for the names that it declares, which its own configs refer to.
        let is_same = |other: &&(Cow<'static, str>, u32)| std::ptr::eq(other.0.as_ref(), name);
        let found = self.0.iter().find(is_same).map(|(_, value)| *value);
        found.or_else(|| self.place(name).ok().map(|place| self.0[place].1))
    }

    /// Replaces the number of this name, if there is one.
    pub fn insert(&mut self, name: impl Into<Cow<'static, str>>, value: u32) {
        let name = name.into();
        match self.place(&name) {
            Ok(place) => self.0[place].1 = value,
            Err(place) => self.0.insert(place, (name, value)),
        }
    }

    pub fn remove(&mut self, name: &str) {
        self.0.retain(|(other, _)| other != name);
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_ref())
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, u32)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), *value))
    }
}

impl FromIterator<(&'static str, u32)> for NamedNumbers {
    /// The last of two numbers of one name counts.
    fn from_iter<I: IntoIterator<Item = (&'static str, u32)>>(numbers: I) -> Self {
        let numbers = numbers.into_iter();
        let mut named = NamedNumbers(Vec::with_capacity(numbers.size_hint().0));
        numbers.for_each(|(name, value)| named.insert(name, value));
        named
    }
}

impl Serialize for NamedNumbers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.iter())
    }
}

impl Config {
    pub fn new(family: Family, knobs: impl IntoIterator<Item = (&'static str, u32)>) -> Self {
        Config { family, knobs: knobs.into_iter().collect() }
    }

    pub fn get(&self, knob: &str) -> Option<u32> {
        self.knobs.get(knob)
    }

    pub fn with(mut self, knob: &str, value: u32) -> Self {
        match self.knobs.place(knob) {
            Ok(place) => self.knobs.0[place].1 = value,
            Err(_) => self.knobs.insert(knob.to_owned(), value),
        }
        self
    }
}

/// As serde would derive it, without a copy of all values first. A process reads a thousand configs
/// before its first call: those of records and of a pack.
impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Config, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Config;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a family and its knobs")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Config, A::Error> {
                let (mut family, mut knobs) = (None, NamedNumbers::default());
                while let Some(name) = fields.next_key::<String>()? {
                    if name != FAMILY {
                        knobs.insert(name, fields.next_value()?);
                    } else if family.replace(fields.next_value()?).is_some() {
                        return Err(A::Error::duplicate_field(FAMILY));
                    }
                }
                let family = family.ok_or_else(|| A::Error::missing_field(FAMILY))?;
                Ok(Config { family, knobs })
            }
        }

        const FAMILY: &str = "family";
        deserializer.deserialize_map(Fields)
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.family.name())?;
        self.knobs.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_is_read_as_it_is_written_and_needs_one_family() {
        let config = Config::new(Family::Decode, [("block_n", 64), ("num_splits", 3)]);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(text, r#"{"family":"decode","block_n":64,"num_splits":3}"#);
        for text in [text.as_str(), r#"{"num_splits":3,"family":"decode","block_n":64}"#] {
            assert_eq!(serde_json::from_str::<Config>(text).unwrap(), config);
        }
        for (text, reason) in [
            (r#"{"block_n":64}"#, "missing field `family`"),
            (r#"{"family":"sm80","family":"sm90"}"#, "duplicate field `family`"),
            (r#"{"family":"sm70"}"#, "unknown variant `sm70`"),
            (r#"{"family":"sm80","block_n":"64"}"#, "invalid type"),
            (r#"{"family":"sm80","block_n":-1}"#, "invalid value"),
            ("[]", "a family and its knobs"),
        ] {
            let error = serde_json::from_str::<Config>(text).unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
