//! Data-driven scripts: text files of commands and their expected output.
//!
//! A script consists of blocks that are separated by empty lines. A block is a list of commands, then a line that
//! starts with `----`, and the output of the commands. Lines that start with `#` are comments. A test that runs with
//! `UPDATE=1` rewrites the output.

use std::path::Path;

/// The line between the commands and the output of a block starts with this.
pub const SCRIPT_SEPARATOR: &str = "----";

/// The commands and comments of each block, without its output.
pub fn parse_script(script: &str) -> Vec<Vec<String>> {
    let blocks = script.split("\n\n").filter(|text| !text.trim().is_empty());
    let input = |text: &str| {
        let lines = text.lines().skip_while(|line| line.is_empty());
        lines.take_while(|line| !line.starts_with(SCRIPT_SEPARATOR)).map(str::to_owned).collect()
    };
    blocks.map(input).collect()
}

/// Runs the script at `path` and compares the result with the file, or rewrites the file. `run` gets the text of the
/// script and returns it with the output.
///
/// # Panics
/// If the output differs.
pub fn check_script(path: &Path, run: impl FnOnce(&str) -> String) {
    let expected = std::fs::read_to_string(path).expect("the script exists");
    let found = run(&expected);
    if std::env::var("UPDATE").is_ok_and(|what| what == "1") {
        return std::fs::write(path, &found).expect("the script can be written");
    }
    if let Some(line) = first_difference(&expected, &found) {
        let show = |text: &str| text.lines().skip(line.saturating_sub(8)).take(16).collect::<Vec<_>>().join("\n");
        let (name, expected, found) = (path.display(), show(&expected), show(&found));
        let line = line + 1;
        panic!("{name} differs at line {line}; UPDATE=1 rewrites it\n\nexpected:\n{expected}\n\nfound:\n{found}");
    }
}

/// The index of the first line that differs.
fn first_difference(one: &str, other: &str) -> Option<usize> {
    let lines = one.lines().count().max(other.lines().count());
    (0..lines).find(|i| one.lines().nth(*i) != other.lines().nth(*i))
}

/// Checks `testdata/scripts/{name}.txt`, a script for one component. `run_command` gets a command, its words after the
/// first one, and appends its output.
///
/// # Panics
/// If the output differs.
#[cfg(test)]
pub(crate) fn check_component_script(name: &str, mut run_command: impl FnMut(&str, &[&str], &mut String)) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/scripts").join(name).with_extension("txt");
    check_script(&path, |script| {
        let mut texts = Vec::new();
        for block in parse_script(script) {
            let (mut text, mut output, mut has_commands) = (block.join("\n") + "\n", String::new(), false);
            for line in block.iter().filter(|line| !line.starts_with('#')) {
                let mut words = line.split_whitespace();
                let command = words.next().expect("a line of a block is not empty");
                run_command(command, &words.collect::<Vec<_>>(), &mut output);
                has_commands = true;
            }
            if has_commands {
                text += &format!("{SCRIPT_SEPARATOR}\n{output}");
            }
            texts.push(text);
        }
        texts.join("\n")
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_different_line_is_found() {
        assert_eq!(first_difference("a\nb\nc\n", "a\nx\nc\n"), Some(1));
        assert_eq!(first_difference("a\n", "a\nb\n"), Some(1));
        assert_eq!(first_difference("a\n", "a\n"), None);
    }
}
