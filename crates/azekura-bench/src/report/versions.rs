//! Which version of an engine was measured: what the lock file pins, or what the engine says itself.

use crate::engine::registry;
use crate::report::document::Document;
use std::process::Command;

/// Engines that are crates are as the lock file says.
const LOCK: &str = include_str!("../../../../Cargo.lock");

/// The version of azekura, with its commit if the sources are at hand and unchanged or not.
pub(crate) fn ours() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let git = |arguments: &[&str]| {
        let answer = Command::new("git").arg("-C").arg(env!("CARGO_MANIFEST_DIR")).args(arguments).output().ok()?;
        answer.status.success().then(|| String::from_utf8_lossy(&answer.stdout).trim().to_owned())
    };
    match git(&["rev-parse", "--short", "HEAD"]).filter(|commit| !commit.is_empty()) {
        Some(commit) => {
            let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
            format!("{version} ({commit}{})", if changed { ", changed" } else { "" })
        }
        None => version.to_owned(),
    }
}

/// The version of engine `name`, if it is a crate.
pub(crate) fn of(name: &str) -> Option<String> {
    if registry::is_ours(name) {
        return Some(env!("CARGO_PKG_VERSION").to_owned());
    }
    locked(LOCK, name)
}

fn locked(lock: &str, name: &str) -> Option<String> {
    let entry = lock.split("[[package]]").find(|entry| {
        entry.lines().any(|line| line.strip_prefix("name = ").is_some_and(|value| value.trim_matches('"') == name))
    })?;
    let version = entry.lines().find_map(|line| line.strip_prefix("version = "))?;
    Some(version.trim_matches('"').to_owned())
}

/// Fills in the versions that engines told with their measurements, as `version` among their own figures.
pub(crate) fn told(document: &mut Document) {
    for note in &mut document.engines {
        let own = document.sections.iter().flat_map(|section| &section.measurements);
        let said = own
            .filter(|one| one["engine"] == note.name.as_str())
            .find_map(|one| one["engine_stats"]["version"].as_str());
        note.version = said.map(str::to_owned).or(note.version.take());
    }
}

#[cfg(test)]
mod tests {
    use super::{locked, of, ours, told};
    use crate::report::document::tests::sample;
    use serde_json::json;

    #[test]
    fn crates_are_as_locked() {
        let entry = |name: &str, version: &str| format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n");
        let lock = format!("version = 4\n{}{}", entry("a-b", "9.0.0"), entry("a", "1.2.3"));
        assert_eq!(locked(&lock, "a").as_deref(), Some("1.2.3"));
        assert_eq!(locked(&lock, "b"), None);
        assert!(of("fjall").unwrap().starts_with("3."), "the lock file pins it");
        assert!(ours().starts_with(env!("CARGO_PKG_VERSION")));
    }

    #[test]
    fn an_engine_knows_its_version_best() {
        let mut document = sample();
        document.sections[0].measurements[1]["engine_stats"] = json!({"version": "10.1"});
        told(&mut document);
        let versions: Vec<_> = document.engines.iter().map(|note| note.version.as_deref()).collect();
        assert_eq!(versions, [Some("0.1.0"), Some("10.1"), None]);
    }
}
