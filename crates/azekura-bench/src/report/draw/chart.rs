//! Charts: lines over time, dots on a logarithmic axis, bars. An engine has the same colour and shape everywhere.

use crate::report::draw::scale::Scale;
use crate::report::draw::svg::{Anchor, Svg};
use crate::report::quantity;

const STYLE: &str = include_str!("../style.css");

const WIDTH: f64 = 420.0;
const LEFT: f64 = 50.0;
const RIGHT: f64 = WIDTH - 14.0;
const TOP: f64 = 34.0;
const PLOT_HEIGHT: f64 = 170.0;
const ROW: f64 = 22.0;
const LEGEND_ROW: f64 = 18.0;
/// Pixels of one character of the small font, generously.
const CHARACTER: f64 = 6.9;
/// More points than a chart has pixels for are thinned out.
const POINTS_MAX: usize = 120;

/// Engines by their place in the palette; others share the last colour.
pub(crate) const PALETTE: [&str; 8] =
    ["azekura", "rocksdb", "fjall", "surrealkv", "redb", "heed", "sled", "azekura-pmem"];

/// The class that gives an engine its colour, and the shape of its marks.
pub(crate) fn look(engine: &str) -> (String, usize) {
    let place = PALETTE.iter().position(|known| *known == engine);
    match place {
        Some(place) => (format!("e e-{engine}"), place),
        None => ("e e-other".to_owned(), PALETTE.len()),
    }
}

/// From a name to a class and a shape.
type Look<'a> = dyn Fn(&str) -> (String, usize) + 'a;

/// One engine's course over time.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) engine: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Lines over `x_label`, from 0; `None` if nobody has two points.
pub(crate) fn lines(title: &str, x_label: &str, lines: &[Line]) -> Option<String> {
    lines_with(title, x_label, lines, &look)
}

/// The same as a drawing that stands alone, with a style of its own; lines need not be engines, and look by their turn.
pub(crate) fn alone(title: &str, x_label: &str, lines: &[Line]) -> Option<String> {
    let place = |name: &str| lines.iter().position(|line| line.engine == name).unwrap_or(lines.len());
    let in_turn = |name: &str| match place(name) {
        place if place < PALETTE.len() => (look(PALETTE[place]).0, place),
        place => (look("").0, place),
    };
    let svg = lines_with(title, x_label, lines, &in_turn)?;
    let (head, rest) = svg.split_once('>')?;
    Some(format!("{head}><style>{STYLE}svg {{ background: var(--card); }}\n</style>{rest}\n"))
}

/// Lines, each with the look that its name has.
fn lines_with(title: &str, x_label: &str, lines: &[Line], look: &Look<'_>) -> Option<String> {
    let drawn: Vec<Line> = lines.iter().map(finite).filter(|line| line.points.len() > 1).collect();
    let points = || drawn.iter().flat_map(|line| &line.points);
    points().next()?;
    let bottom = TOP + PLOT_HEIGHT;
    let largest = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(0.0, f64::max);
    let x = Scale::linear(largest(|point| point.0), 5, (LEFT, RIGHT));
    let y = Scale::linear(largest(|point| point.1), 4, (bottom, TOP));
    let names: Vec<&str> = drawn.iter().map(|line| line.engine.as_str()).collect();
    let legend = Legend::of(&names);
    let peaks: Vec<String> = drawn.iter().map(|line| format!("{} up to {}", line.engine, peak(line))).collect();
    let height = bottom + 40.0 + legend.height();
    let mut svg = Svg::new(WIDTH, height, title, &peaks.join(", "));
    svg.text("title", (4.0, 18.0), Anchor::Start, title);
    horizontal_grid(&mut svg, &y);
    // There is no half of a thread.
    for &tick in x.ticks.iter().filter(|tick| x_label != "threads" || tick.fract() == 0.0) {
        svg.text("tick", (x.at(tick), bottom + 15.0), Anchor::Middle, &axis_number(tick));
    }
    svg.text("tick", (RIGHT, bottom + 29.0), Anchor::End, x_label);
    for line in &drawn {
        let (class, shape) = look(&line.engine);
        let pixels: Vec<(f64, f64)> = line.points.iter().map(|&(at, value)| (x.at(at), y.at(value))).collect();
        svg.polyline(&format!("line {class}"), &pixels);
        let last = line.points.last().map_or(0.0, |point| point.1);
        let hint = format!("{}: {} at the end", line.engine, quantity::short(last));
        svg.marker(&format!("mark {class}"), shape, pixels.last().copied().unwrap_or_default(), &hint);
    }
    legend.draw(&mut svg, bottom + 46.0, &names, look);
    Some(svg.finish())
}

/// The points that are numbers, no more of them than can be told apart.
fn finite(line: &Line) -> Line {
    let all: Vec<(f64, f64)> =
        line.points.iter().copied().filter(|(at, value)| at.is_finite() && value.is_finite()).collect();
    let every = all.len().div_ceil(POINTS_MAX).max(1);
    let last = all.len().saturating_sub(1);
    let kept = all.iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last).map(|(_, point)| *point);
    Line { engine: line.engine.clone(), points: kept.collect() }
}

fn peak(line: &Line) -> String {
    quantity::short(line.points.iter().map(|point| point.1).fold(0.0, f64::max))
}

fn horizontal_grid(svg: &mut Svg, y: &Scale) {
    for (i, &tick) in y.ticks.iter().enumerate() {
        let class = if i == 0 { "axis" } else { "grid" };
        svg.line(class, (LEFT, y.at(tick)), (RIGHT, y.at(tick)));
        svg.text("tick", (LEFT - 6.0, y.at(tick) + 4.0), Anchor::End, &axis_number(tick));
    }
}

/// A tick without zeros that say nothing: `2.5 k`, `10`.
fn axis_number(number: f64) -> String {
    let text = quantity::short(number);
    let (digits, unit) = text.split_once(' ').map_or((text.as_str(), ""), |(digits, unit)| (digits, unit));
    let digits = if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits };
    format!("{digits}{unit}")
}

/// One engine's row of dots; what is missing is not drawn.
#[derive(Clone, Debug)]
pub(crate) struct Dots {
    pub(crate) engine: String,
    pub(crate) values: Vec<Option<f64>>,
}

/// Microseconds on a logarithmic axis, a row per engine, a shade per percentile; `None` if there is nothing to show.
pub(crate) fn latencies(title: &str, names: &[&str], rows: &[Dots]) -> Option<String> {
    let values = || rows.iter().flat_map(|row| row.values.iter().flatten().copied()).filter(|us| *us > 0.0);
    values().next()?;
    let left = row_labels(rows.iter().map(|row| row.engine.as_str()));
    let bottom = TOP + rows.len() as f64 * ROW + 4.0;
    let x = Scale::logarithmic(values(), (left, RIGHT - 8.0));
    let said: Vec<String> = rows.iter().map(|row| said_dots(row, names)).collect();
    let mut svg = Svg::new(WIDTH, bottom + 46.0, title, &said.join("; "));
    svg.text("title", (4.0, 18.0), Anchor::Start, title);
    let every = (x.ticks.len() / 7 + 1).max(1);
    for (i, &tick) in x.ticks.iter().enumerate() {
        svg.line("grid", (x.at(tick), TOP), (x.at(tick), bottom));
        if i % every == 0 {
            svg.text("tick", (x.at(tick), bottom + 15.0), Anchor::Middle, &trimmed_micros(tick));
        }
    }
    for (i, row) in rows.iter().enumerate() {
        let (class, _) = look(&row.engine);
        let y = TOP + (i as f64 + 0.5) * ROW;
        svg.text("label", (left - 8.0, y + 4.0), Anchor::End, &row.engine);
        let present: Vec<f64> = row.values.iter().flatten().copied().filter(|us| *us > 0.0).collect();
        if let (Some(&first), Some(&last)) = (present.first(), present.last()) {
            svg.line(&format!("span {class}"), (x.at(first), y), (x.at(last), y));
        } else {
            svg.text("tick", (left, y + 4.0), Anchor::Start, "no figures");
        }
        for (place, us) in row.values.iter().enumerate().filter_map(|(i, us)| Some((i, us.filter(|us| *us > 0.0)?))) {
            let name = names.get(place).copied().unwrap_or_default();
            let hint = format!("{}: {name} {}", row.engine, quantity::micros(us));
            svg.marker(&format!("dot {class}"), percentile_shape(place), (x.at(us), y), &hint);
        }
    }
    let mut at = left;
    for (place, name) in names.iter().enumerate() {
        svg.marker("dot plain", percentile_shape(place), (at + 5.0, bottom + 33.0), name);
        svg.text("label", (at + 14.0, bottom + 37.0), Anchor::Start, name);
        at += 34.0 + name.chars().count() as f64 * CHARACTER;
    }
    Some(svg.finish())
}

/// Percentiles are told apart by shape: circle, diamond, triangle, square.
fn percentile_shape(place: usize) -> usize {
    [0, 2, 3, 1].get(place).copied().unwrap_or(4)
}

fn said_dots(row: &Dots, names: &[&str]) -> String {
    let one = |(name, us): (&&str, &Option<f64>)| format!("{name} {}", quantity::or_none(*us, quantity::micros));
    format!("{}: {}", row.engine, names.iter().zip(&row.values).map(one).collect::<Vec<_>>().join(", "))
}

fn trimmed_micros(us: f64) -> String {
    match us {
        _ if us >= 1e6 => format!("{} s", us / 1e6),
        _ if us >= 1e3 => format!("{} ms", us / 1e3),
        _ if us >= 1.0 => format!("{us} µs"),
        _ => format!("{} ns", (us * 1e3).round()),
    }
}

/// Pixels that the longest of some names takes at the left.
fn row_labels<'a>(names: impl Iterator<Item = &'a str>) -> f64 {
    let longest = names.map(|name| name.chars().count()).max().unwrap_or(0);
    (longest as f64 * CHARACTER + 14.0).clamp(40.0, WIDTH / 2.0)
}

/// One engine's bar; `None` is shown as missing.
#[derive(Clone, Debug)]
pub(crate) struct Bar {
    pub(crate) engine: String,
    pub(crate) value: Option<f64>,
}

/// Bars from 0, a row per engine, each with its number; `None` if no engine has one.
pub(crate) fn bars(title: &str, rows: &[Bar], show: fn(f64) -> String) -> Option<String> {
    let largest = rows.iter().filter_map(|row| row.value).filter(|value| value.is_finite()).reduce(f64::max)?;
    let left = row_labels(rows.iter().map(|row| row.engine.as_str()));
    let bottom = TOP + rows.len() as f64 * ROW + 2.0;
    let x = Scale::linear(largest, 4, (left, RIGHT - 52.0));
    let said: Vec<String> =
        rows.iter().map(|row| format!("{} {}", row.engine, quantity::or_none(row.value, show))).collect();
    let mut svg = Svg::new(WIDTH, bottom + 24.0, title, &said.join(", "));
    svg.text("title", (4.0, 18.0), Anchor::Start, title);
    for &tick in &x.ticks {
        svg.line("grid", (x.at(tick), TOP), (x.at(tick), bottom));
        svg.text("tick", (x.at(tick), bottom + 15.0), Anchor::Middle, &axis_number(tick));
    }
    for (i, row) in rows.iter().enumerate() {
        let (class, _) = look(&row.engine);
        let y = TOP + i as f64 * ROW;
        svg.text("label", (left - 8.0, y + ROW / 2.0 + 4.0), Anchor::End, &row.engine);
        let text = quantity::or_none(row.value, show);
        let end = x.at(row.value.unwrap_or(0.0));
        if row.value.is_some() {
            let hint = format!("{}: {text}", row.engine);
            svg.rect(&format!("bar {class}"), (left, y + 4.0), ((end - left).max(1.0), ROW - 8.0), &hint);
        }
        svg.text("label", (end + 6.0, y + ROW / 2.0 + 4.0), Anchor::Start, &text);
    }
    Some(svg.finish())
}

/// Names below a chart, in as many rows as they need.
struct Legend {
    places: Vec<(f64, usize)>,
    rows: usize,
}

impl Legend {
    fn of(names: &[&str]) -> Legend {
        let mut places = Vec::new();
        let (mut x, mut row) = (LEFT, 0);
        for name in names {
            let width = 30.0 + name.chars().count() as f64 * CHARACTER;
            if x + width > WIDTH && x > LEFT {
                (x, row) = (LEFT, row + 1);
            }
            places.push((x, row));
            x += width;
        }
        Legend { places, rows: row + 1 }
    }

    fn height(&self) -> f64 {
        self.rows as f64 * LEGEND_ROW + 4.0
    }

    fn draw(&self, svg: &mut Svg, top: f64, names: &[&str], look: &Look<'_>) {
        for (&(x, row), name) in self.places.iter().zip(names) {
            let (class, shape) = look(name);
            let y = top + row as f64 * LEGEND_ROW;
            svg.marker(&format!("mark {class}"), shape, (x + 5.0, y), name);
            svg.text("label", (x + 14.0, y + 4.0), Anchor::Start, name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Bar, Dots, Line, PALETTE, alone, bars, latencies, lines, look};
    use crate::report::quantity::three_digits;

    fn texts(svg: &str) -> Vec<String> {
        let drawing = roxmltree::Document::parse(svg).unwrap();
        let texts = drawing.descendants().filter(|node| node.has_tag_name("text"));
        texts.map(|node| node.text().unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn every_engine_has_one_look() {
        let looks: Vec<_> = super::PALETTE.iter().map(|engine| look(engine)).collect();
        for (i, one) in looks.iter().enumerate() {
            assert!(looks[i + 1..].iter().all(|other| other.0 != one.0), "{one:?}");
        }
        assert_eq!(look("nosuchdb").0, "e e-other");
    }

    #[test]
    fn lines_have_axes_and_a_legend() {
        let course = |engine: &str, top: f64| Line {
            engine: engine.into(),
            points: (0..=1000).map(|s| (f64::from(s), top * f64::from(s) / 1000.0)).collect(),
        };
        let odd = Line { engine: "<odd>".into(), points: vec![(0.0, 1.0), (f64::NAN, 2.0), (2.0, f64::INFINITY)] };
        let svg =
            lines("ops/s & time", "seconds", &[course("azekura", 93_000.0), course("fjall", 500.0), odd]).unwrap();
        let texts = texts(&svg);
        for text in ["ops/s & time", "seconds", "0", "25k", "100k", "1k", "azekura", "fjall"] {
            assert!(texts.iter().any(|one| one == text), "{text} in {texts:?}");
        }
        assert!(!texts.contains(&"<odd>".to_owned()), "one point makes no line");
        let drawing = roxmltree::Document::parse(&svg).unwrap();
        let polylines: Vec<_> = drawing.descendants().filter(|node| node.has_tag_name("polyline")).collect();
        assert_eq!(polylines.len(), 2);
        let points = polylines[0].attribute("points").unwrap().split(' ').count();
        assert!((100..=130).contains(&points), "{points}");
        assert!(lines("nothing", "s", &[]).is_none());
    }

    #[test]
    fn latencies_stand_on_powers_of_ten() {
        let rows = [
            Dots { engine: "azekura".into(), values: vec![Some(0.5), Some(12.0), Some(900.0)] },
            Dots { engine: "sled".into(), values: vec![Some(0.0), None, None] },
        ];
        let svg = latencies("latency", &["p50", "p99", "p99.9"], &rows).unwrap();
        let texts = texts(&svg);
        for text in ["100 ns", "1 µs", "10 µs", "1 ms", "p99.9", "sled", "no figures"] {
            assert!(texts.iter().any(|one| one == text), "{text} in {texts:?}");
        }
        assert!(svg.contains("azekura: p50 500 ns"), "{svg}");
        assert!(latencies("nothing", &["p50"], &rows[1..]).is_none());
    }

    #[test]
    fn a_chart_that_stands_alone_has_its_style_and_a_look_for_each_line() {
        let line = |i: usize| Line { engine: format!("way {i} & more"), points: vec![(0.0, 1.0), (1.0, i as f64)] };
        let all: Vec<Line> = (0..PALETTE.len() + 1).map(line).collect();
        let svg = alone("space", "seconds", &all).unwrap();
        let drawing = roxmltree::Document::parse(&svg).unwrap();
        assert!(drawing.descendants().any(|node| node.has_tag_name("style")));
        let lines = drawing.descendants().filter(|node| node.has_tag_name("polyline"));
        let mut looks: Vec<&str> = lines.filter_map(|line| line.attribute("class")).collect();
        assert_eq!((looks[0], looks.len()), ("line e e-azekura", all.len()));
        looks.sort_unstable();
        looks.dedup();
        assert_eq!(looks.len(), all.len(), "each looks different");
        assert!(alone("nothing", "seconds", &[]).is_none());
    }

    #[test]
    fn bars_say_their_number_and_what_is_missing() {
        let bar = |engine: &str, value| Bar { engine: engine.into(), value };
        let rows = [bar("azekura", Some(12.34)), bar("redb", Some(0.0)), bar("heed", None)];
        let texts = texts(&bars("write amp", &rows, three_digits).unwrap());
        for text in ["12.3", "0", "–", "heed"] {
            assert!(texts.iter().any(|one| one == text), "{text} in {texts:?}");
        }
        assert!(bars("nothing", &rows[2..], three_digits).is_none());
    }
}
