//! The HTML page: one file, inline style and drawings, no script. Conditions first, then what azekura won and lost.

use crate::report::columns::{goal_heading, show_goal, shown};
use crate::report::document::{Document, EngineNote, Section};
use crate::report::draw::svg::escape;
use crate::report::draw::{cases as drawings, chart};
use crate::report::facts;
use crate::report::figures::{Case, Verdict, cases};
use crate::report::quantity;
use std::fmt::Write as _;

const STYLE: &str = include_str!("style.css");

/// Cells that hold HTML already.
type Row = Vec<String>;

/// The whole page.
pub(crate) fn render(document: &Document) -> String {
    let mut body = String::new();
    head(&mut body, document);
    conditions(&mut body, document);
    summary(&mut body, document);
    for (i, section) in document.sections.iter().enumerate() {
        self::section(&mut body, document, section, i);
    }
    reading(&mut body);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>azekura beside its peers, {}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\
         </main>\n</body>\n</html>\n",
        escape(&document.made),
    )
}

fn add(body: &mut String, text: &str) {
    body.push_str(text);
    body.push('\n');
}

fn head(body: &mut String, document: &Document) {
    add(body, "<header>\n<h1>azekura beside its peers</h1>");
    let line = format!(
        "Preset {}, azekura {}, {}. It took {}, {} were planned.",
        document.preset,
        document.version,
        document.made,
        quantity::seconds(document.took_s),
        quantity::seconds(document.planned_s),
    );
    add(body, &format!("<p class=\"soft\">{}</p>", escape(&line)));
    for section in document.sections.iter().filter(|section| section.dropped.is_some()) {
        let words = section.dropped.as_deref().unwrap_or_default();
        add(body, &format!("<p class=\"notice\">{}: {}</p>", escape(&section.title), escape(words)));
    }
    add(body, "<nav class=\"small\"><a href=\"#summary\">Summary</a>");
    for (i, section) in document.sections.iter().enumerate() {
        add(body, &format!("<a href=\"#s{i}\">{}</a>", escape(&section.title)));
    }
    add(body, "</nav>\n</header>");
}

fn conditions(body: &mut String, document: &Document) {
    add(body, "<section>\n<h2 id=\"conditions\">Conditions</h2>\n<dl class=\"facts\">");
    for (name, value) in facts::facts(document) {
        add(body, &format!("<div><dt>{}</dt><dd>{}</dd></div>", escape(&name), escape(&value)));
    }
    add(body, "</dl>");
    let heading = ["device below the databases", "before", "after"].map(escape).to_vec();
    let rows = facts::device(document).into_iter().map(|row| row.iter().map(|cell| escape(cell)).collect());
    table(body, &heading, rows.collect::<Vec<_>>().as_slice(), &[]);
    add(body, "<h3>Engines</h3>");
    let rows: Vec<Row> = document.engines.iter().map(engine_row).collect();
    table(body, &["engine", "version", "in this run"].map(str::to_owned), &rows, &[2]);
    add(body, &format!("<p class=\"small\">Made by <code>{}</code></p>\n</section>", escape(&document.command)));
}

fn engine_row(engine: &EngineNote) -> Row {
    let missing = engine.missing.as_ref().map(|why| format!("no: {why}"));
    vec![
        named(&engine.name),
        escape(engine.version.as_deref().unwrap_or(quantity::NONE)),
        escape(missing.as_deref().unwrap_or("yes")),
    ]
}

/// An engine's name beside its colour.
fn named(engine: &str) -> String {
    let (class, _) = chart::look(engine);
    format!("<span class=\"{}\"><span class=\"swatch\"></span>{}</span>", escape(&class), escape(engine))
}

/// A table that scrolls by itself where it is too wide; `words` are the columns that hold sentences.
fn table(body: &mut String, heading: &[String], rows: &[Row], words: &[usize]) {
    let class = |column: usize| if words.contains(&column) { " class=\"words\"" } else { "" };
    add(body, "<div class=\"scroll\"><table>\n<thead><tr>");
    for (i, cell) in heading.iter().enumerate() {
        let _ = write!(body, "<th scope=\"col\"{}>{cell}</th>", class(i)); // writing to a string cannot fail
    }
    add(body, "</tr></thead>\n<tbody>");
    for row in rows {
        body.push_str(if row.len() == 1 { "<tr class=\"group\">" } else { "<tr>" });
        match row.as_slice() {
            [alone] => {
                let _ = write!(body, "<th scope=\"rowgroup\" colspan=\"{}\"><span>{alone}</span></th>", heading.len());
            }
            cells => cells.iter().enumerate().for_each(|(i, cell)| {
                let (tag, scope) = if i == 0 { ("th", " scope=\"row\"") } else { ("td", "") };
                let _ = write!(body, "<{tag}{scope}{}>{cell}</{tag}>", class(i));
            }),
        }
        add(body, "</tr>");
    }
    add(body, "</tbody></table></div>");
}

fn summary(body: &mut String, document: &Document) {
    add(body, "<section>\n<h2 id=\"summary\">Summary</h2>");
    let mut rows: Vec<Row> = Vec::new();
    let (mut won, mut lost) = (0, 0);
    for (i, section) in document.sections.iter().enumerate() {
        rows.push(vec![format!("<a href=\"#s{i}\">{}</a>, {}", escape(&section.title), goal_words(section))]);
        for case in cases(document, section) {
            let verdict = case.verdict();
            match &verdict {
                Some(verdict) if verdict.wins() => won += 1,
                Some(_) => lost += 1,
                None => {}
            }
            rows.push(summary_row(&case, verdict.as_ref()));
        }
    }
    let compared = won + lost;
    add(
        body,
        &format!(
            "<p>Medians over rounds. The ratio is azekura to the best peer of that row, above 1 where azekura is \
             ahead, with its range over the rounds.</p>\n\
             <p class=\"tally\"><span class=\"verdict win\">▲ {won} won</span> \
             <span class=\"verdict loss\">▼ {lost} lost</span> \
             <span class=\"soft\">of {compared} comparisons</span></p>"
        ),
    );
    let mut heading = vec!["workload".to_owned(), "azekura ÷ best peer".to_owned()];
    heading.extend(document.engines.iter().map(|engine| named(&engine.name)));
    table(body, &heading, &rows, &[]);
    add(body, "</section>");
}

fn goal_words(section: &Section) -> String {
    let goal = &section.goal;
    let heading = goal_heading(goal);
    escape(&if goal.less_is_better { format!("time to {heading}, less is better") } else { heading })
}

fn summary_row(case: &Case<'_>, verdict: Option<&Verdict>) -> Row {
    let goal = &case.section.goal;
    let mut row = vec![escape(&case.label()), verdict.map_or_else(|| no_verdict(case), show_verdict)];
    for standing in &case.standings {
        let best = case.best() == Some(&standing.engine);
        let figure = standing.goal(goal).map(|number| escape(&show_goal(goal, number)));
        let figure = figure.map(|text| if best { format!("<b class=\"best\">{text}</b>") } else { text });
        let trouble = standing.remarks().map(|words| escape(&words));
        row.push(match (figure, trouble) {
            (Some(figure), None) => figure,
            (Some(figure), Some(trouble)) => format!("<span title=\"{trouble}\">{figure} *</span>"),
            (None, trouble) => {
                let words = trouble.unwrap_or_default();
                format!("<span class=\"soft\" title=\"{words}\">{}</span>", standing.brief())
            }
        });
    }
    row
}

fn no_verdict(case: &Case<'_>) -> String {
    let ours = case.standings.iter().find(|standing| standing.engine == crate::engine::registry::OURS);
    match ours.and_then(|standing| standing.goal(&case.section.goal)) {
        Some(_) => "<span class=\"soft\">no peer</span>".into(),
        None => "<span class=\"verdict loss\">▼ no figure</span>".into(),
    }
}

fn show_verdict(verdict: &Verdict) -> String {
    let (class, word) = if verdict.wins() { ("win", "▲ win") } else { ("loss", "▼ loss") };
    let ratio = escape(&quantity::times(verdict.ratio));
    let range = verdict.range.map_or_else(String::new, |(low, high)| {
        format!("{}–{}, ", quantity::three_digits(low), quantity::three_digits(high))
    });
    let disputed = if verdict.disputed() { "; rounds disagree" } else { "" };
    format!(
        "<span class=\"verdict {class}\">{word} {ratio}</span><span class=\"range\">{}{}{disputed}</span>",
        escape(&range),
        escape(&verdict.peer),
    )
}

fn section(body: &mut String, document: &Document, section: &Section, i: usize) {
    add(body, &format!("<section>\n<h2 id=\"s{i}\">{}</h2>", escape(&section.title)));
    add(body, &format!("<p>{}</p>", escape(&section.about)));
    add(body, &format!("<p class=\"small soft\"><code>{}</code></p>", escape(&section.command)));
    if let Some(words) = &section.dropped {
        add(body, &format!("<p class=\"notice\">{}</p>", escape(words)));
    }
    let all = cases(document, section);
    for group in all.chunk_by(|one, next| one.workload == next.workload) {
        add(body, &format!("<h3>{}</h3>", escape(&group[0].workload)));
        if let [case] = group {
            figures_table(body, case, document.rounds);
            charts(body, drawings::of_case(case));
            continue;
        }
        threads_table(body, group);
        charts(body, drawings::of_threads(group));
        for case in group {
            add(body, &format!("<details><summary>{}</summary>", escape(&case.label())));
            figures_table(body, case, document.rounds);
            charts(body, drawings::of_case(case));
            add(body, "</details>");
        }
    }
    add(body, "</section>");
}

/// One row per engine with every figure, and in words what went wrong.
fn figures_table(body: &mut String, case: &Case<'_>, rounds: u32) {
    let goal = &case.section.goal;
    let columns = shown(case);
    let mut heading = vec!["engine".to_owned(), escape(&goal_heading(goal))];
    heading.extend(columns.iter().map(|column| escape(column.heading)));
    heading.push("remarks".to_owned());
    let rows = case.standings.iter().map(|standing| {
        let figure = escape(&quantity::or_none(standing.goal(goal), |number| show_goal(goal, number)));
        let best = case.best() == Some(&standing.engine);
        let mut row =
            vec![named(&standing.engine), if best { format!("<b class=\"best\">{figure}</b>") } else { figure }];
        row.extend(columns.iter().map(|column| escape(&column.cell(standing))));
        let mut remarks = standing.remarks().unwrap_or_default();
        if standing.trouble.is_none() && standing.round_count() < rounds as usize {
            let _ = write!(
                remarks,
                "{}{} of {rounds} rounds",
                if remarks.is_empty() { "" } else { "; " },
                standing.round_count()
            );
        }
        row.push(escape(&remarks));
        row
    });
    table(body, &heading, &rows.collect::<Vec<_>>(), &[heading.len() - 1]);
}

/// How each engine scales with threads, and how many commits share a sync where that is told.
fn threads_table(body: &mut String, group: &[Case<'_>]) {
    let goal = &group[0].section.goal;
    let count =
        |case: &Case<'_>| if case.threads == 1 { "1 thread".into() } else { format!("{} threads", case.threads) };
    let mut heading = vec!["engine".to_owned()];
    heading.extend(group.iter().map(count));
    heading.push(format!("{} ÷ {}", group[group.len() - 1].threads, group[0].threads));
    let mut rows: Vec<Row> = Vec::new();
    for (i, standing) in group[0].standings.iter().enumerate() {
        let mut row = vec![named(&standing.engine)];
        for case in group {
            row.push(threads_cell(case, i));
        }
        let ends = [group.first(), group.last()].map(|case| case.and_then(|case| case.standings[i].goal(goal)));
        let factor = ends[1].zip(ends[0]).and_then(|(last, first)| crate::report::figures::ratio(last, first));
        row.push(escape(&quantity::or_none(factor, quantity::times)));
        rows.push(row);
    }
    let mut verdicts = vec!["azekura ÷ best peer".to_owned()];
    let verdict = |case: &Case<'_>| case.verdict().map_or_else(|| no_verdict(case), |verdict| show_verdict(&verdict));
    verdicts.extend(group.iter().map(verdict));
    verdicts.push(String::new());
    rows.push(verdicts);
    table(body, &heading, &rows, &[]);
}

fn threads_cell(case: &Case<'_>, engine: usize) -> String {
    let goal = &case.section.goal;
    let standing = &case.standings[engine];
    let Some(figure) = standing.goal(goal) else {
        let words = escape(&standing.remarks().unwrap_or_default());
        return format!("<span class=\"soft\" title=\"{words}\">{}</span>", standing.brief());
    };
    let figure = escape(&show_goal(goal, figure));
    let figure = if case.best() == Some(&standing.engine) { format!("<b class=\"best\">{figure}</b>") } else { figure };
    let syncs = standing.median("commits_per_sync").map_or_else(String::new, |commits| {
        format!("<span class=\"range\">{} per sync</span>", escape(&quantity::three_digits(commits)))
    });
    format!("{figure}{syncs}")
}

fn charts(body: &mut String, drawings: Vec<String>) {
    if drawings.is_empty() {
        return;
    }
    add(body, "<div class=\"charts\">");
    for drawing in drawings {
        add(body, &format!("<figure>{drawing}</figure>"));
    }
    add(body, "</div>");
}

fn reading(body: &mut String) {
    const NOTES: [&str; 5] = [
        "Latencies run from the end of one operation to the end of the next, the making of the key and the check of \
         the value included.",
        "CPU per op is that of the whole process, background threads included, until the engine is at rest.",
        "Write amp is bytes written per byte of keys and values; space amp is bytes on disk per byte of live data.",
        "Peak RSS is the kernel's high-water mark, pages of mapped files included.",
        "A star, a dash or a word in place of a figure is explained in the remarks of its table. Courses over time are \
         those of the middle round.",
    ];
    add(body, "<section>\n<h2 id=\"reading\">How to read it</h2>\n<ul>");
    NOTES.iter().for_each(|note| add(body, &format!("<li>{}</li>", escape(note))));
    add(body, "</ul>\n</section>");
}

#[cfg(test)]
mod tests {
    use super::render;
    use crate::report::document::Document;
    use crate::report::document::tests::sample;
    use roxmltree::Node;

    /// The page is XML but for its first line; the parser wants no DOCTYPE.
    fn parsed(document: &Document, look: impl FnOnce(Node<'_, '_>)) {
        let page = render(document);
        let body = page.strip_prefix("<!DOCTYPE html>\n").unwrap();
        look(roxmltree::Document::parse(body).unwrap().root_element());
    }

    fn all<'a, 'b>(root: Node<'a, 'b>, tag: &str) -> Vec<Node<'a, 'b>> {
        root.descendants().filter(|node| node.has_tag_name(tag)).collect()
    }

    fn said(node: Node<'_, '_>) -> String {
        node.descendants().filter_map(|node| node.text().filter(|_| node.is_text())).collect()
    }

    #[test]
    fn the_page_has_its_parts_in_order() {
        parsed(&sample(), |root| {
            let headings: Vec<String> = all(root, "h2").into_iter().map(said).collect();
            assert_eq!(headings, ["Conditions", "Summary", "Reads & writes", "After a kill", "How to read it"]);
            let workloads: Vec<String> = all(root, "h3").into_iter().map(said).collect();
            assert_eq!(workloads, ["Engines", "readrandom", "overwrite", "recovery"]);
            assert!(all(root, "script").is_empty() && all(root, "link").is_empty(), "nothing is loaded");
            let text = said(root);
            for words in ["A <Model> 9000", "no: not in this build", "Linux 6.1.0", "▲ 2 won", "▼ 1 lost"] {
                assert!(text.contains(words), "{words}");
            }
        });
    }

    #[test]
    fn wins_and_losses_are_marked_alike() {
        parsed(&sample(), |root| {
            let marks = |class: &str| {
                let own = |node: &Node<'_, '_>| node.attribute("class") == Some(class);
                all(root, "td").into_iter().flat_map(|cell| all(cell, "span")).filter(own).map(said).collect::<Vec<_>>()
            };
            // Each stands in the summary; those of several numbers of threads in their table too.
            assert_eq!(marks("verdict win"), ["▲ win 2.00×", "▲ win 4.00×", "▲ win 2.00×"]);
            assert_eq!(marks("verdict loss"), ["▼ loss 0.5×"]);
            assert!(said(root).contains("0.5–3.00, fjall; rounds disagree"));
        });
    }

    #[test]
    fn tables_are_whole_and_trouble_is_told() {
        parsed(&sample(), |root| {
            for table in all(root, "table") {
                let columns = all(all(table, "thead")[0], "th").len();
                for row in all(all(table, "tbody")[0], "tr") {
                    let cells: Vec<_> = row.children().filter(Node::is_element).collect();
                    let spans = cells.iter().any(|cell| cell.attribute("colspan").is_some());
                    assert!(spans || cells.len() == columns, "{} of {columns}", cells.len());
                }
            }
            let text = said(root);
            for words in
                ["timed out after 5 s", "<disk> full", "did not come to rest", "lost 1200 records", "2 of 3 rounds"]
            {
                assert!(text.contains(words), "{words}");
            }
        });
    }

    #[test]
    fn every_link_within_the_page_leads_somewhere() {
        parsed(&sample(), |root| {
            let ids: Vec<&str> = root.descendants().filter_map(|node| node.attribute("id")).collect();
            for link in all(root, "a") {
                let target = link.attribute("href").unwrap().trim_start_matches('#');
                assert!(ids.contains(&target), "{target}");
            }
        });
    }

    #[test]
    fn charts_are_drawn_for_what_was_measured() {
        parsed(&sample(), |root| {
            let titles: Vec<String> = all(root, "svg").into_iter().map(|svg| said(all(svg, "title")[0])).collect();
            for title in ["readrandom: ops/s over time", "readrandom: latency", "overwrite: write amplification"] {
                assert!(titles.iter().any(|one| one == title), "{title} in {titles:?}");
            }
            assert!(!titles.iter().any(|one| one.starts_with("readrandom: write")), "{titles:?}");
            assert!(titles.contains(&"recovery: open (ms)".to_owned()), "{titles:?}");
        });
    }

    #[test]
    fn an_empty_run_is_a_page_too() {
        let mut document = sample();
        document.sections.iter_mut().for_each(|section| section.measurements.clear());
        parsed(&document, |root| assert!(said(root).contains("▲ 0 won")));
    }
}
