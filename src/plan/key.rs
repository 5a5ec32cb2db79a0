//! Keys: the problem class, the bucketed shape, and the text that a record is found by.
//!
//! `v1 forward bf16 d128 dv128 causal nodropout vec8 gqa4 b1 hq32 sq4096 sk4096`: what stands
//! before `gqa` is the class and must match exactly, since an executable is built for it; the rest
//! is the shape, in buckets, and may be answered by the nearest. Features follow the class, and a
//! window's sides the shape, where there are any: `… vec8 window softcap gqa4 … sk4096 l1024`. A
//! new field of Problem belongs here, with a new version, but for `deterministic` and
//! `batch_invariant`: such problems have no records. Not the cubin's key: that is a hash of the
//! rendered text.

use super::canonical::bucket;
use crate::device::{Arch, Device};
use crate::problem::{Dtype, Feature, Features, Layout, Pass, Problem, Varlen, Window};
use std::fmt;

pub use super::canonical::{canonical, distance};

/// Changes when a key's meaning does; records of another version are ignored.
const VERSION: &str = "v1";

/// What an executable is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Class {
    pub pass: Pass,
    pub dtype: Dtype,
    pub head_dim: i64,
    pub head_dim_v: i64,
    /// Either alignment, and any window to the right: the diagonal's offset is a launch parameter.
    pub is_causal: bool,
    /// Any window to the left, likewise.
    pub has_window: bool,
    pub dropout: bool,
    pub deterministic: bool,
    pub batch_invariant: bool,
    /// Without a window, and without the row counts of varlen tensors.
    pub features: Features,
    pub layout: Layout,
}

impl Class {
    pub fn of(problem: &Problem) -> Class {
        Class {
            pass: problem.pass,
            dtype: problem.dtype,
            head_dim: problem.head_dim,
            head_dim_v: problem.head_dim_v,
            is_causal: problem.right_shift().is_some(),
            has_window: problem.left_shift().is_some(),
            dropout: problem.dropout,
            deterministic: problem.deterministic,
            batch_invariant: problem.batch_invariant,
            features: Features {
                window: Window::default(),
                varlen: problem.features.varlen.map(|_| Varlen::default()),
                ..problem.features
            },
            layout: problem.layout,
        }
    }

    /// A word for each property that not every class has, as the key ends with them.
    pub fn feature_words(&self) -> Vec<String> {
        let flags = [(self.deterministic, "deterministic"), (self.batch_invariant, "batchinvariant")];
        let flags = flags.into_iter().filter(|(is_on, _)| *is_on).map(|(_, name)| name.to_owned());
        let is_on = |feature: &&Feature| match feature {
            Feature::Window => self.has_window,
            other => self.features.is_on(**other),
        };
        let features = Feature::ALL.iter().filter(is_on).map(|feature| (feature.row().word)(&self.features));
        flags.chain(features).collect()
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} d{} dv{} {} {} vec{}",
            match self.pass {
                Pass::Forward => "forward",
                Pass::Backward => "backward",
            },
            self.dtype.name(),
            self.head_dim,
            self.head_dim_v,
            if self.is_causal { "causal" } else { "full" },
            if self.dropout { "dropout" } else { "nodropout" },
            self.layout.elements()
        )?;
        self.feature_words().iter().try_for_each(|word| write!(f, " {word}"))
    }
}

/// The key of a problem's record.
pub fn record_key(problem: &Problem) -> String {
    let Window { left, right, .. } = problem.features.window;
    let side = |name, side: Option<i64>| side.map_or(String::new(), |keys| format!(" {name}{}", bucket(keys)));
    format!(
        "{VERSION} {} gqa{} b{} hq{} sq{} sk{}{}{}",
        Class::of(problem),
        bucket(problem.group_size()),
        bucket(problem.batch_size),
        bucket(problem.num_heads_q),
        bucket(problem.seqlen_q),
        bucket(problem.seqlen_k),
        side("l", left),
        side("r", right)
    )
}

/// The class in a key, as `Class` is displayed; None in a text that is no key of this version.
pub fn class_in_key(key: &str) -> Option<&str> {
    let (class, _) = key.strip_prefix(VERSION)?.strip_prefix(' ')?.split_once(" gqa")?;
    Some(class)
}

/// What a machine's record is bound to: `sm_90 nvidia-h200 x132`. The processor count tells parts
/// of a GPU (MIG), and numbers of CPU threads, apart.
pub fn device_key(device: &Device) -> String {
    device_key_of(device.arch, &device.name, device.sm_count)
}

pub fn device_key_of(arch: Arch, name: &str, sm_count: u32) -> String {
    format!("{arch} {} x{sm_count}", slug(name))
}

/// A device's name as it stands in keys and file names: lower case, digits and single hyphens.
pub fn slug(name: &str) -> String {
    let mut slug = String::new();
    for c in name.chars() {
        match c.is_ascii_alphanumeric() {
            true => slug.push(c.to_ascii_lowercase()),
            false if !slug.is_empty() && !slug.ends_with('-') => slug.push('-'),
            false => {}
        }
    }
    slug.truncate(slug.trim_end_matches('-').len());
    slug
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{BlockMask, Causal};
    use std::collections::HashSet;

    pub const LLAMA: Problem = Problem {
        num_heads_kv: 8,
        causal: Causal::BottomRight,
        ..Problem::dense(Pass::Forward, Dtype::Bf16, 1, 32, 4096, 128)
    };

    #[test]
    fn the_key_is_readable() {
        let key = record_key(&LLAMA);
        assert_eq!(key, "v1 forward bf16 d128 dv128 causal nodropout vec8 gqa4 b1 hq32 sq4096 sk4096");
    }

    #[test]
    fn every_field_of_the_class_is_in_the_key() {
        let others = [
            Problem { pass: Pass::Backward, ..LLAMA },
            Problem { dtype: Dtype::Fp16, ..LLAMA },
            Problem { head_dim: 96, ..LLAMA },
            Problem { head_dim_v: 96, ..LLAMA },
            Problem { causal: Causal::None, ..LLAMA },
            Problem { dropout: true, ..LLAMA },
            Problem { deterministic: true, ..LLAMA },
            Problem { batch_invariant: true, ..LLAMA },
            Problem { layout: Layout::Vec4, ..LLAMA },
        ];
        let none = Features::NONE;
        let of_blocks =
            |block_q, block_k| Features { block_mask: Some(BlockMask { block_q, block_k }), ..Features::NONE };
        let features = [
            Features { window: Window { left: Some(100), ..Window::default() }, ..none },
            Features { varlen: Some(Varlen::default()), ..none },
            Features { paged: Some(16), ..none },
            of_blocks(128, 128),
            of_blocks(128, 64),
            of_blocks(64, 128),
        ];
        let flags = Feature::ALL.iter().map(|feature| {
            let mut features = none;
            features.switch_on(*feature);
            features
        });
        let features = features.into_iter().chain(flags.filter(|features| !features.is_none()));
        let others = others.into_iter().chain(features.map(|features| Problem { features, ..LLAMA }));
        for other in others.clone() {
            assert_ne!(record_key(&LLAMA), record_key(&other), "{other:?}");
            assert_ne!(Class::of(&LLAMA), Class::of(&other), "{other:?}");
        }
        let keys: HashSet<String> = others.clone().map(|other| record_key(&other)).collect();
        assert_eq!(keys.len(), others.count(), "no two of them share a key");
        // A runtime shift: the same executable, the same record.
        assert_eq!(record_key(&LLAMA), record_key(&Problem { causal: Causal::TopLeft, ..LLAMA }));
        let window = |top_left| Problem {
            causal: Causal::None,
            features: Features { window: Window { left: Some(100), right: Some(20), top_left }, ..none },
            ..LLAMA
        };
        assert_eq!(record_key(&window(false)), record_key(&window(true)));
        assert_eq!(canonical(&window(false)), canonical(&window(true)));
    }

    #[test]
    fn the_canonical_problem_has_the_same_key_and_is_its_own() {
        let window = |left, right| Window { left, right, top_left: false };
        let packed = |total_q, total_k| {
            let varlen = Some(Varlen { total_q, total_k, ..Varlen::default() });
            Features { varlen, ..Features::NONE }
        };
        let features = [
            (Causal::BottomRight, Features::NONE),
            (Causal::BottomRight, Features { window: window(Some(4001), None), ..Features::NONE }),
            (Causal::None, Features { window: window(Some(70), Some(9)), ..Features::NONE }),
            (Causal::None, Features { window: window(None, Some(900)), ..Features::NONE }),
            (Causal::BottomRight, packed(None, None)),
            (Causal::None, packed(Some(70_001), Some(80_003))),
            (Causal::BottomRight, Features { window: window(Some(300), None), ..packed(Some(70_001), None) }),
        ];
        for (heads, kv, seqlen) in [(28, 4, 1000), (71, 1, 4097), (12, 12, 77), (40, 10, 1)] {
            for (causal, features) in features {
                let sizes = Problem { num_heads_q: heads, num_heads_kv: kv, seqlen_q: seqlen, ..LLAMA };
                let problem = Problem { seqlen_k: 2 * seqlen, causal, features, ..sizes };
                let canonical = canonical(&problem);
                canonical.validate().unwrap();
                assert_eq!(super::canonical(&canonical), canonical);
                assert_eq!(record_key(&canonical), record_key(&problem));
                assert_eq!(Class::of(&canonical), Class::of(&problem));
                assert!(distance(&problem, &canonical) < 0.8, "{problem:?}");
            }
        }
    }

    #[test]
    fn few_batch_invariant_queries_are_the_same_problem_in_every_batch() {
        let paged = Features { paged: Some(16), varlen: Some(Varlen::default()), ..Features::NONE };
        let packed = Varlen { total_q: Some(7000), total_k: Some(9000), padded_q: false };
        let packed = Features { varlen: Some(packed), ..Features::NONE };
        let padded = Varlen { padded_q: true, ..Varlen::default() };
        let padded = Features { varlen: Some(padded), ..Features::NONE };
        let own = |features, seqlen_q| Problem { batch_invariant: true, features, seqlen_q, ..LLAMA };
        for (features, lengths_q) in [
            // 16 x 4 packed rows are few.
            (Features::NONE, &[1][..]),
            (paged, &[16]),
            // The longest of the batch, so that the tiles are not known.
            (packed, &[1, 16, 17, 131_072]),
            (padded, &[1, 16, 17, 131_072]),
            (Features { paged: Some(16), ..padded }, &[1, 16, 17, 131_072]),
        ] {
            let first = canonical(&own(features, lengths_q[0]));
            first.validate().unwrap();
            assert_eq!(canonical(&first), first);
            for seqlen_q in lengths_q {
                for (batch_size, seqlen_k) in [(1, 1), (1, 131_072), (64, 1), (64, 300), (1000, 131_072)] {
                    let problem = Problem { batch_size, seqlen_k, ..own(features, *seqlen_q) };
                    assert_eq!(canonical(&problem), first, "{problem:?}");
                    assert_eq!(Class::of(&problem), Class::of(&first));
                }
            }
        }
        assert_ne!(canonical(&own(Features::NONE, 1)), canonical(&own(Features::NONE, 17)));
    }

    #[test]
    fn batch_invariant_tiles_are_counted_until_they_fill_a_gpu() {
        let of = |batch_size, seqlen_q, seqlen_k| {
            let problem = Problem { batch_invariant: true, batch_size, seqlen_q, seqlen_k, ..LLAMA };
            let found = canonical(&problem);
            found.validate().unwrap();
            assert_eq!(canonical(&found), found);
            assert_eq!(Class::of(&problem), Class::of(&found));
            assert!(!found.has_few_queries_in_any_batch());
            found
        };
        let full = of(64, 131_072, 131_072);
        assert_eq!(of(1, 16_384, 70_000), full);
        assert_ne!(of(1, 512, 8192), full);
        // Tiles of 17 and of 100 queries are as many.
        assert_eq!(of(1, 17, 8192), of(1, 100, 100_000));
        assert_ne!(of(1, 512, 8192), of(1, 512, 512), "causal tiles differ");
        for (batch_size, seqlen_q, seqlen_k) in [(1, 49_152, 1), (3, 700, 200_000), (9, 65, 65), (1, 17, 1)] {
            of(batch_size, seqlen_q, seqlen_k);
        }
    }

    #[test]
    fn slugs_name_files() {
        assert_eq!(slug("NVIDIA H200"), "nvidia-h200");
        assert_eq!(slug("Intel(R) Xeon(R) CPU @ 2.20GHz"), "intel-r-xeon-r-cpu-2-20ghz");
        assert_eq!(slug("NVIDIA A100-SXM4-80GB MIG 1g.10gb "), "nvidia-a100-sxm4-80gb-mig-1g-10gb");
    }
}
