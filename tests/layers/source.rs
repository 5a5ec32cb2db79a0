//! Source: the paths that a Rust file names, and the modules that a Python file imports.
//!
//! A scan of the text, not a parser: it drops comments, literals and test modules, expands `use`
//! trees, and finds paths elsewhere in the code. It knows nothing of layers and circles.

/// A path in a file, as written: `["super", "geometry", "kernels"]`.
pub type Path = Vec<String>;

/// What one Rust file names.
#[derive(Debug, Default)]
pub struct Named {
    /// The leaves of `use` trees that re-export: `pub use`, `pub(crate) use`. With the name that
    /// each is given here.
    pub reexports: Vec<(String, Path)>,
    /// The same of private `use`.
    pub uses: Vec<(String, Path)>,
    /// Paths outside `use`: `super::check(…)`, `crate::cuda::library::open(…)`, `child::f(…)`.
    pub paths: Vec<Path>,
}

pub fn named(text: &str) -> Named {
    let code = without_tests(&without_comments_and_literals(text));
    let mut named = Named::default();
    let mut rest = String::new();
    for statement in code.split(';') {
        let (before, tree) = at_use(statement);
        rest += before;
        rest.push(';');
        let is_public = before.trim_end().ends_with(['b', ')']);
        let leaves = if is_public { &mut named.reexports } else { &mut named.uses };
        tree.into_iter().for_each(|tree| expand(&mut Vec::new(), tree, leaves));
    }
    named.paths = paths(&rest);
    named
}

/// The code with each comment, string and character literal replaced by a space.
fn without_comments_and_literals(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let at = |index: usize| chars.get(index).copied().unwrap_or('\0');
    let mut code = String::new();
    let mut index = 0;
    while index < chars.len() {
        let hashes = (1..).take_while(|ahead| at(index + ahead) == '#').count();
        let is_raw = at(index) == 'r' && at(index + 1 + hashes) == '"' && !code.ends_with(is_word);
        index = match (at(index), at(index + 1)) {
            ('/', '/') => (index..).find(|&end| matches!(at(end), '\n' | '\0')).unwrap(),
            ('/', '*') => {
                (index + 2..).find(|&end| (at(end), at(end + 1)) == ('*', '/') || at(end) == '\0').unwrap() + 2
            }
            _ if is_raw => {
                let closes = |end: usize| at(end) == '"' && (1..=hashes).all(|ahead| at(end + ahead) == '#');
                (index + 2 + hashes..).find(|&end| closes(end) || at(end) == '\0').unwrap() + 1 + hashes
            }
            ('"', _) => end_of_literal(&chars, index, '"'),
            ('\'', '\\') => end_of_literal(&chars, index, '\''),
            // A lifetime has no quote behind its first letter.
            ('\'', _) if at(index + 2) == '\'' => index + 3,
            (other, _) => {
                code.push(other);
                index += 1;
                continue;
            }
        };
        code.push(' ');
    }
    code
}

fn end_of_literal(chars: &[char], start: usize, quote: char) -> usize {
    let mut index = start + 1;
    while index < chars.len() && chars[index] != quote {
        index += if chars[index] == '\\' { 2 } else { 1 };
    }
    index + 1
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// A file's tests see what they like: they check that modules agree, and the library does not
/// contain them.
fn without_tests(code: &str) -> String {
    let mut kept = String::new();
    let mut rest = code;
    while let Some(start) = rest.find("#[cfg(test)]") {
        kept += &rest[..start];
        let body = rest[start..].find(['{', ';']).map_or(rest.len(), |at| start + at);
        let mut depth = 0;
        let end = rest[body..].char_indices().find(|(_, c)| {
            depth += i32::from(*c == '{') - i32::from(*c == '}');
            depth == 0
        });
        rest = end.map_or("", |(at, _)| &rest[body + at + 1..]);
    }
    kept + rest
}

/// What stands before `use` in a statement, and the tree behind it, where there is one.
fn at_use(statement: &str) -> (&str, Option<&str>) {
    let begins_here = |at: usize| {
        let before = statement[..at].trim_end();
        let is_word_of_its_own =
            !statement[..at].ends_with(is_word) && statement[at + 3..].starts_with(char::is_whitespace);
        is_word_of_its_own && (before.is_empty() || before.ends_with(['{', '}', ')', ']']) || before.ends_with("pub"))
    };
    match statement.match_indices("use").map(|(at, _)| at).find(|at| begins_here(*at)) {
        Some(at) => (&statement[..at], Some(&statement[at + 3..])),
        None => (statement, None),
    }
}

/// Adds the leaves of a `use` tree: `super::{a, b::{C, D as E}}`.
fn expand(prefix: &mut Path, tree: &str, leaves: &mut Vec<(String, Path)>) {
    let tree = tree.trim();
    let depth_before = prefix.len();
    let (head, list) = match tree.find('{') {
        Some(at) => (&tree[..at], Some(&tree[at + 1..tree.rfind('}').unwrap_or(tree.len())])),
        None => (tree, None),
    };
    let (head, alias) = head.split_once(" as ").map_or((head, None), |(head, alias)| (head, Some(alias.trim())));
    prefix.extend(head.split("::").map(|segment| segment.trim().to_owned()).filter(|segment| !segment.is_empty()));
    match list {
        None => {
            if prefix.last().is_some_and(|last| last == "self") && prefix.len() > 1 {
                prefix.pop();
            }
            let name = alias.or(prefix.last().map(String::as_str)).unwrap_or_default().to_owned();
            leaves.push((name, prefix.clone()));
        }
        Some(list) => split_list(list).into_iter().for_each(|item| expand(prefix, item, leaves)),
    }
    prefix.truncate(depth_before);
}

/// The items of a braced list; commas inside inner braces do not part them.
fn split_list(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut items) = (0, 0, Vec::new());
    for (at, c) in list.char_indices() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            items.push(&list[start..at]);
            start = at + 1;
        }
    }
    items.push(&list[start..]);
    items.retain(|item| !item.trim().is_empty());
    items
}

/// Every `a::b::c` in the code.
fn paths(code: &str) -> Vec<Path> {
    let words = code.split(|c: char| !is_word(c) && c != ':');
    let paths = words
        .filter(|word| word.contains("::"))
        .map(|word| word.split("::").map(str::to_owned).take_while(|segment| !segment.is_empty()).collect::<Path>());
    paths.filter(|path| path.len() > 1 || path.first().is_some_and(|first| first != "self")).collect()
}

/// The modules of its own package that a Python file imports, at the top or inside a function:
/// `from . import a, b`, `from ._a import f`.
pub fn python_imports(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for statement in text.split("from .").skip(1) {
        let Some((module, names)) = statement.split_once(" import ") else { continue };
        let names = match names.strip_prefix('(') {
            Some(list) => list.split(')').next(),
            None => names.lines().next(),
        };
        match module.trim() {
            "" => found.extend(names.unwrap_or("").split(',').filter_map(|name| name.split_whitespace().next())),
            module => found.push(module),
        }
    }
    found.into_iter().map(str::to_owned).collect()
}
