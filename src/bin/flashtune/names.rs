//! Values of options by their names in problem files and records.

use serde::de::{DeserializeOwned, IntoDeserializer};

/// Parses a value by its name in problem files and records.
pub fn by_name<T: DeserializeOwned>(name: &str) -> Result<T, serde::de::value::Error> {
    T::deserialize(name.into_deserializer())
}
