//! Circles: which modules of a folder import one another, and the circles among them.
//!
//! The nodes of a folder are its modules and its own file (`mod.rs`, `main.rs`). An import is an
//! edge of the deepest folder that holds both ends. A path into another folder leads to the module
//! that defines the item, through the re-exports on its way.

use crate::source::{Named, Path};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A folder's own file, as a node beside its modules.
const OWN_FILE: &str = "mod.rs";

/// The modules of one crate, by their paths: `["kernel", "render"]`. The crate's own file is the
/// empty path.
#[derive(Default)]
pub struct Modules(BTreeMap<Path, Named>);

/// The pairs (importing module, imported module) of each folder.
pub type Edges = BTreeMap<Path, BTreeSet<(String, String)>>;

impl Modules {
    pub fn insert(&mut self, module: Path, named: Named) {
        self.0.insert(module, named);
    }

    pub fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (module, named) in &self.0 {
            for (is_reexport, target) in self.targets(module, named) {
                // A folder's table of contents is no dependency of the folder's own file.
                if target == *module || is_reexport && target.starts_with(module) {
                    continue;
                }
                let shared = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
                let node = |path: &Path| path.get(shared).map_or(OWN_FILE, String::as_str).to_owned();
                edges.entry(module[..shared].to_vec()).or_default().insert((node(module), node(&target)));
            }
        }
        edges
    }

    /// The modules of this crate that a module names, and whether that is a re-export.
    fn targets(&self, module: &Path, named: &Named) -> Vec<(bool, Path)> {
        let reexports = named.reexports.iter().map(|(_, path)| (true, path));
        let uses = named.uses.iter().map(|(_, path)| (false, path));
        let all = reexports.chain(uses).chain(named.paths.iter().map(|path| (false, path)));
        all.filter_map(|(is_reexport, path)| Some((is_reexport, self.resolve(module, path)?))).collect()
    }

    /// The module that a path from `module` leads to; None where that is in another crate, or no
    /// module's.
    fn resolve(&self, module: &Path, path: &[String]) -> Option<Path> {
        let mut at = module.clone();
        let mut rest = path.iter();
        match path.first()?.as_str() {
            "crate" => drop((rest.next(), at.clear())),
            "self" => drop(rest.next()),
            "super" => {}
            child => {
                let child = [module.as_slice(), &[child.to_owned()]].concat();
                self.0.get(&child)?;
            }
        }
        while let Some(segment) = rest.next() {
            if segment == "super" {
                at.pop()?;
                continue;
            }
            let inner = [at.as_slice(), std::slice::from_ref(segment)].concat();
            if self.0.contains_key(&inner) {
                at = inner;
                continue;
            }
            let here = self.0.get(&at)?;
            // A module's own imports seen from itself are edges of their own.
            let imported = here.reexports.iter().chain(&here.uses).find(|(name, _)| name == segment && at != *module);
            return match imported {
                Some((_, origin)) => self.resolve(&at, &[origin.as_slice(), rest.as_slice()].concat()),
                None => Some(at),
            };
        }
        Some(at)
    }
}

/// The circles of a graph, each once and from its first name on: `["a", "b", "a"]`. It finds a
/// shortest circle through each edge that lies on one.
pub fn circles(edges: &BTreeSet<(String, String)>) -> BTreeSet<Vec<String>> {
    let circle = |(from, to): &(String, String)| {
        let mut circle = way(edges, to, from)?;
        let first = circle.iter().enumerate().min_by_key(|(_, name)| name.as_str())?.0;
        circle.rotate_left(first);
        circle.push(circle[0].clone());
        Some(circle)
    };
    edges.iter().filter_map(circle).collect()
}

/// A shortest way through the graph, both ends included.
fn way(edges: &BTreeSet<(String, String)>, start: &str, end: &str) -> Option<Vec<String>> {
    let mut ways = VecDeque::from([vec![start.to_owned()]]);
    let mut seen = BTreeSet::from([start.to_owned()]);
    while let Some(way) = ways.pop_front() {
        let last = way.last()?.clone();
        if last == end {
            return Some(way);
        }
        for (_, next) in edges.iter().filter(|(from, _)| *from == last) {
            if seen.insert(next.clone()) {
                ways.push_back([way.as_slice(), std::slice::from_ref(next)].concat());
            }
        }
    }
    None
}
