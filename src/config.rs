//! Config: *how* a problem is solved, as text: a kernel family and named integers, never an index.
//!
//! Records, the command line and templates share this form, `sm80 block_m=128 block_n=64 …`, with
//! sorted names. A Config keeps whatever was read, including the knobs of another version. `family`
//! declares the names and their legal values, checks them, and computes with typed knobs alone.

use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
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
    pub knobs: BTreeMap<String, u32>,
}

impl Config {
    pub fn new<'a>(family: Family, knobs: impl IntoIterator<Item = (&'a str, u32)>) -> Self {
        Config { family, knobs: knobs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect() }
    }

    pub fn get(&self, knob: &str) -> Option<u32> {
        self.knobs.get(knob).copied()
    }

    pub fn with(mut self, knob: &str, value: u32) -> Self {
        self.knobs.insert(knob.to_owned(), value);
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
                let (mut family, mut knobs) = (None, BTreeMap::new());
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
