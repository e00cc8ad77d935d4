//! Candidates for the word at the end of an unfinished line: commands, options, their values, partitions and keys.

use std::ops::Bound;

use azekura::Database;

use super::shell_command::{self, ShellMode};
use super::words::{self, Word};
use crate::command::range;
use crate::encoding;

/// Maximum number of keys that are offered.
const KEYS_MAX: usize = 50;

/// What there is to complete from.
#[derive(Debug, Default)]
pub(super) struct CompletionSource {
    pub(super) db: Option<Database>,
    /// The partition in use.
    pub(super) partition: String,
}

/// Replacements for the end of a line.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct CompletionList {
    /// Where the replaced text begins.
    pub(super) start: usize,
    pub(super) candidates: Vec<String>,
}

/// What a word stands for.
enum WordKind {
    Commands,
    Partitions,
    Keys,
    /// One of these words.
    OneOf(Vec<String>),
    Unknown,
}

impl CompletionSource {
    /// The candidates for the last word of `line`, which ends at the position of the user.
    pub(super) fn complete(&self, line: &str) -> CompletionList {
        let (before, word) = words::split_unfinished(line);
        let before: Vec<String> = before.iter().map(|word| String::from_utf8_lossy(word).into_owned()).collect();
        let found = match self.kind_of_last(&before, &word) {
            WordKind::Commands => with_prefix(command_names(), &word),
            WordKind::Partitions => with_prefix(self.partitions(), &word),
            WordKind::OneOf(values) => with_prefix(values, &word),
            WordKind::Keys => self.keys(&before, &word),
            WordKind::Unknown => Vec::new(),
        };
        let always_quote = word.is_open || found.iter().any(|bytes| words::quoted(bytes, false).starts_with('"'));
        let mut candidates: Vec<String> = found.iter().map(|bytes| words::quoted(bytes, always_quote)).collect();
        if let [only] = &mut candidates[..] {
            only.push(' ');
        }
        CompletionList { start: word.start, candidates }
    }

    fn kind_of_last(&self, before: &[String], word: &Word) -> WordKind {
        let Some(name) = before.first() else { return WordKind::Commands };
        let all = shell_command::definition(&self.partition, ShellMode::default());
        let Some(command) = all.find_subcommand(name) else {
            return if name == "help" { WordKind::Commands } else { WordKind::Unknown };
        };
        if word.bytes.starts_with(b"--") {
            let options = command.get_arguments().filter_map(|arg| arg.get_long());
            return WordKind::OneOf(options.map(|option| format!("--{option}")).collect());
        }
        let option = before.last().and_then(|last| last.strip_prefix("--"));
        let option = command.get_arguments().find(|arg| arg.get_long().is_some() && arg.get_long() == option);
        if let Some(option) = option.filter(|option| option.get_action().takes_values()) {
            return match option.get_long() {
                Some("partition") => WordKind::Partitions,
                Some("prefix" | "from" | "to") => WordKind::Keys,
                _ => WordKind::OneOf(possible_values(option)),
            };
        }
        let position = positional_words(command, &before[1..]);
        match (command.get_name(), position) {
            ("get" | "put" | "merge", 0) | ("remove", _) => WordKind::Keys,
            ("use" | "drop", 0) => WordKind::Partitions,
            _ => {
                let positional = command.get_positionals().nth(position);
                positional.map_or(WordKind::Unknown, |positional| WordKind::OneOf(possible_values(positional)))
            }
        }
    }

    fn partitions(&self) -> Vec<String> {
        self.db.as_ref().map(Database::list_partitions).unwrap_or_default()
    }

    /// Keys that begin with the word. The last one is always among them: so the longest common prefix of the candidates
    /// is that of all keys. Errors give no candidates.
    fn keys(&self, before: &[String], word: &Word) -> Vec<Vec<u8>> {
        let hex = before.iter().any(|word| word == "--hex");
        let named = before.iter().position(|word| word == "--partition").and_then(|at| before.get(at + 1));
        let name = named.map_or(&*self.partition, |name| name);
        let Some(partition) = self.db.as_ref().and_then(|db| db.partition(name).ok()) else { return Vec::new() };
        let whole_digits = word.bytes.len() / 2 * 2;
        let prefix = if hex { encoding::from_hex(&word.bytes[..whole_digits]) } else { Some(word.bytes.clone()) };
        let Some(prefix) = prefix else { return Vec::new() };
        let end = range::prefix_end(&prefix).map_or(Bound::Unbounded, Bound::Excluded);
        let mut entries = partition.range((Bound::Included(prefix), end));
        let mut keys = Vec::new();
        while keys.len() + 1 < KEYS_MAX
            && let Some(Ok((key, _))) = entries.next()
        {
            keys.push(key.to_vec());
        }
        if keys.len() + 1 == KEYS_MAX
            && let Some(Ok((last, _))) = entries.next_back()
        {
            keys.push(last.to_vec());
        }
        match hex {
            true => with_prefix(keys.iter().map(|key| encoding::to_hex(key)).collect(), word),
            false => keys,
        }
    }
}

fn command_names() -> Vec<String> {
    let all = shell_command::definition("", ShellMode::default());
    let names = all.get_subcommands().map(|command| command.get_name().to_string());
    names.chain(["help".to_string()]).collect()
}

fn possible_values(arg: &clap::Arg) -> Vec<String> {
    arg.get_possible_values().iter().map(|value| value.get_name().to_string()).collect()
}

/// Number of words that are neither options nor their values.
fn positional_words(command: &clap::Command, words: &[String]) -> usize {
    let mut positional = 0;
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let Some(option) = word.strip_prefix("--") else {
            positional += 1;
            continue;
        };
        let takes_value = |arg: &clap::Arg| arg.get_long() == Some(option) && arg.get_action().takes_values();
        if command.get_arguments().any(takes_value) {
            words.next();
        }
    }
    positional
}

fn with_prefix(texts: Vec<String>, word: &Word) -> Vec<Vec<u8>> {
    texts.into_iter().map(String::into_bytes).filter(|text| text.starts_with(&word.bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source() -> (tempfile::TempDir, CompletionSource) {
        let dir = tempfile::tempdir().unwrap();
        let db = azekura::Config::new(dir.path().join("db")).open().unwrap();
        let users = db.open_partition("users", Default::default()).unwrap();
        (0..100).for_each(|n| users.insert(format!("user:{n:02}"), "v").unwrap());
        for key in [&b"two words"[..], b"two \"quotes\"", b"\x00\xff", b"zone"] {
            users.insert(key, "v").unwrap();
        }
        db.open_partition("user events", Default::default()).unwrap();
        (dir, CompletionSource { db: Some(db), partition: "users".into() })
    }

    #[test]
    fn candidates_depend_on_the_place_in_the_line() {
        let (_dir, source) = source();
        let complete = |line: &str| source.complete(line).candidates.join("|");
        assert_eq!(complete("co"), "commit|compact|count");
        assert_eq!(complete("help cou"), "count ");
        assert_eq!(complete("use u"), "\"user events\"|\"users\"");
        assert_eq!(complete("use users"), "users ");
        assert_eq!(complete("get --partition users"), "users ");
        assert_eq!(complete("scan --li"), "--limit ");
        assert_eq!(complete("persist sync-d"), "sync-data ");
        assert_eq!(complete("commit --durability b"), "buffer ");
        assert_eq!(complete("create x --engine p"), "pmem ");
        assert_eq!(complete("get z"), "zone ");
        assert_eq!(complete("get --hex 7a"), "7a6f6e65 ");
        assert_eq!(complete("get --hex 00f"), "00ff ");
        assert_eq!(complete("scan --prefix zo"), "zone ");
        assert_eq!(complete("get two"), "\"two \\\"quotes\\\"\"|\"two words\"");
        assert_eq!(complete("get \"two w"), "\"two words\" ");
        assert_eq!(complete("remove zone z"), "zone ");
        for nothing in ["fly ", "get zone z", "put zone z", "scan --limit ", "get --hex zz", "get nothing", "count z"] {
            assert_eq!(complete(nothing), "", "{nothing}");
        }
        assert_eq!(source.complete("get --partition users  zo").start, 23);
        assert_eq!(CompletionSource::default().complete("get z").candidates, [""; 0]);
    }

    #[test]
    fn many_keys_share_the_prefix_of_all() {
        let (_dir, source) = source();
        let keys = source.complete("get u").candidates;
        assert_eq!((keys.len(), &*keys[0], &*keys[49]), (50, "user:00", "user:99"));
    }
}
