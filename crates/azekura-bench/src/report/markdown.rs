//! The same in GitHub-flavoured Markdown: conditions, and one table of medians and verdicts.

use crate::report::columns::{goal_heading, show_goal};
use crate::report::document::{Document, Section};
use crate::report::facts;
use crate::report::figures::{Case, Verdict, cases};
use crate::report::quantity;
use std::fmt::Write as _;

/// The whole document.
pub(crate) fn render(document: &Document) -> String {
    let mut text = format!(
        "# azekura beside its peers\n\nPreset {}, azekura {}, {}. Made by `{}`.\n\n",
        cell(&document.preset),
        cell(&document.version),
        cell(&document.made),
        document.command.replace('`', "'"),
    );
    let facts = facts::facts(document).into_iter().map(|(name, value)| vec![name, value]);
    table(&mut text, &["condition", ""].map(str::to_owned), &facts.collect::<Vec<_>>(), 2);
    let device: Vec<Vec<String>> = facts::device(document).into_iter().map(|row| row.to_vec()).collect();
    table(&mut text, &["device below the databases", "before", "after"].map(str::to_owned), &device, 1);
    let engines = document.engines.iter().map(|engine| {
        let missing = engine.missing.as_ref().map_or_else(|| "yes".to_owned(), |why| format!("no: {why}"));
        vec![engine.name.clone(), engine.version.clone().unwrap_or_else(|| quantity::NONE.into()), missing]
    });
    table(&mut text, &["engine", "version", "in this run"].map(str::to_owned), &engines.collect::<Vec<_>>(), 3);
    let verdicts: Vec<Verdict> = document
        .sections
        .iter()
        .flat_map(|section| cases(document, section).into_iter().filter_map(|case| case.verdict()))
        .collect();
    let won = verdicts.iter().filter(|verdict| verdict.wins()).count();
    let lost = verdicts.len() - won;
    let _ = writeln!(
        text,
        "Won {won}, lost {lost} of {} comparisons. Figures are medians over rounds; the ratio is azekura to the best \
         peer of the row, above 1 where azekura is ahead, with its range over the rounds.",
        verdicts.len()
    );
    for section in &document.sections {
        self::section(&mut text, document, section);
    }
    text
}

fn section(text: &mut String, document: &Document, section: &Section) {
    let goal = &section.goal;
    let less = if goal.less_is_better { "; less is better" } else { "" };
    let _ =
        write!(text, "\n## {}\n\n{} ({}{less})\n\n", cell(&section.title), cell(&section.about), goal_heading(goal));
    if let Some(words) = &section.dropped {
        let _ = write!(text, "**{}**\n\n", cell(words));
    }
    let mut heading = vec!["workload".to_owned(), "azekura ÷ best peer".to_owned()];
    heading.extend(document.engines.iter().map(|engine| engine.name.clone()));
    let all = cases(document, section);
    let rows: Vec<Vec<String>> = all.iter().map(row).collect();
    table(text, &heading, &rows, 1);
    for case in &all {
        for standing in &case.standings {
            // Engines that are missing altogether are told once, in the table of engines.
            let absent = document.engines.iter().any(|one| one.name == standing.engine && one.missing.is_some());
            if let Some(words) = standing.remarks().filter(|_| !absent) {
                let _ = writeln!(text, "- {}, {}: {}", cell(&case.label()), cell(&standing.engine), cell(&words));
            }
        }
    }
}

fn row(case: &Case<'_>) -> Vec<String> {
    let goal = &case.section.goal;
    let mut row = vec![case.label(), verdict(case)];
    row.extend(case.standings.iter().map(|standing| {
        let mut figure = quantity::or_none(standing.goal(goal), |number| show_goal(goal, number));
        if let Some(commits) = standing.median("commits_per_sync") {
            let _ = write!(figure, " ({} per sync)", quantity::three_digits(commits));
        }
        let star = if standing.remarks().is_some() { " *" } else { "" };
        if case.best() == Some(&standing.engine) { format!("**{figure}**{star}") } else { format!("{figure}{star}") }
    }));
    row
}

fn verdict(case: &Case<'_>) -> String {
    let Some(verdict) = case.verdict() else { return quantity::NONE.into() };
    let word = if verdict.wins() { "▲ win" } else { "▼ loss" };
    let range = verdict.range.map_or_else(String::new, |(low, high)| {
        format!(" ({}–{})", quantity::three_digits(low), quantity::three_digits(high))
    });
    let disputed = if verdict.disputed() { ", rounds disagree" } else { "" };
    format!("**{word} {}**{range}, {}{disputed}", quantity::times(verdict.ratio), verdict.peer)
}

/// Text that breaks no table and no line.
fn cell(text: &str) -> String {
    let one_line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    one_line.replace('\\', "\\\\").replace('|', "\\|").replace('<', "&lt;")
}

/// A table whose first `words` columns stand left and the rest right.
fn table(text: &mut String, heading: &[String], rows: &[Vec<String>], words: usize) {
    let line =
        |cells: &[String]| format!("| {} |\n", cells.iter().map(|one| cell(one)).collect::<Vec<_>>().join(" | "));
    text.push_str(&line(heading));
    let rules: Vec<&str> = (0..heading.len()).map(|i| if i < words { "---" } else { "--:" }).collect();
    let _ = writeln!(text, "|{}|", rules.join("|"));
    rows.iter().for_each(|row| text.push_str(&line(row)));
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::{cell, render};
    use crate::report::document::tests::sample;

    #[test]
    fn the_sample_is_told_as_expected() {
        let text = render(&sample());
        assert_eq!(text, include_str!("sample.md"), "sample.md says what is expected; the text is:\n{text}");
    }

    #[test]
    fn cells_break_no_table() {
        assert_eq!(cell("a|b\n<c> \\d"), "a\\|b &lt;c> \\\\d");
        let mut document = sample();
        document.engines[1].missing = Some("no | such\nthing".into());
        let text = render(&document);
        assert!(text.contains("| no: no \\| such thing |"), "{text}");
    }
}
