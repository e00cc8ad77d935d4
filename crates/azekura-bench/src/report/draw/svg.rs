//! A small writer of SVG, and the escaping of text for it and for HTML.

use std::fmt::Write as _;

/// Text as it may stand between tags and inside quoted attributes. Control characters, which no XML may hold, become
/// spaces.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c if c.is_control() && c != '\n' || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push(' '),
            c => safe.push(c),
        }
    }
    safe
}

/// A coordinate: one decimal, and 0 for what is no number.
fn coordinate(number: f64) -> f64 {
    if number.is_finite() { (number * 10.0).round() / 10.0 } else { 0.0 }
}

/// Where a text is held.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// A drawing under way. Colours and fonts are the style sheet's: everything drawn has a class.
#[derive(Debug)]
pub(crate) struct Svg {
    text: String,
}

impl Svg {
    /// Begins a drawing; title and description are read out where it cannot be seen.
    pub(crate) fn new(width: f64, height: f64, title: &str, description: &str) -> Svg {
        let (width, height) = (coordinate(width), coordinate(height));
        let label = escape(&format!("{title}. {description}"));
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
             aria-label=\"{label}\">"
        );
        let _ = write!(text, "<title>{}</title>", escape(title)); // writing to a string cannot fail
        Svg { text }
    }

    pub(crate) fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        let [x1, y1, x2, y2] = [x1, y1, x2, y2].map(coordinate);
        let class = escape(class);
        let _ = write!(self.text, "<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>");
    }

    pub(crate) fn polyline(&mut self, class: &str, points: &[(f64, f64)]) {
        let points: Vec<String> = points.iter().map(|&(x, y)| format!("{},{}", coordinate(x), coordinate(y))).collect();
        let class = escape(class);
        let _ = write!(self.text, "<polyline class=\"{class}\" points=\"{}\"/>", points.join(" "));
    }

    /// A rectangle with a text that shows when pointed at.
    pub(crate) fn rect(&mut self, class: &str, (x, y): (f64, f64), (width, height): (f64, f64), hint: &str) {
        let [x, y, width, height] = [x, y, width, height].map(coordinate);
        let (width, height) = (width.max(0.0), height.max(0.0));
        let _ = write!(
            self.text,
            "<rect class=\"{}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"><title>{}</title></rect>",
            escape(class),
            escape(hint),
        );
    }

    pub(crate) fn text(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let [x, y] = [x, y].map(coordinate);
        let (class, text) = (escape(class), escape(text));
        let _ = write!(self.text, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{text}</text>");
    }

    /// One of six shapes about (x, y), so that colour alone tells nothing.
    pub(crate) fn marker(&mut self, class: &str, shape: usize, (x, y): (f64, f64), hint: &str) {
        let r = 4.0;
        let points: &[(f64, f64)] = match shape % 6 {
            1 => &[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
            2 => &[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)],
            3 => &[(0.0, -1.2), (1.2, 1.0), (-1.2, 1.0)],
            4 => &[(0.0, 1.2), (1.2, -1.0), (-1.2, -1.0)],
            5 => &[(-1.3, -0.5), (1.3, -0.5), (1.3, 0.5), (-1.3, 0.5)],
            _ => &[],
        };
        let (class, hint) = (escape(class), escape(hint));
        if points.is_empty() {
            let [x, y] = [x, y].map(coordinate);
            let _ = write!(
                self.text,
                "<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"{r}\"><title>{hint}</title></circle>"
            );
            return;
        }
        let corner = |&(dx, dy): &(f64, f64)| format!("{},{}", coordinate(x + dx * r), coordinate(y + dy * r));
        let points = points.iter().map(corner).collect::<Vec<_>>().join(" ");
        let _ = write!(self.text, "<polygon class=\"{class}\" points=\"{points}\"><title>{hint}</title></polygon>");
    }

    /// Ends the drawing and gives it.
    pub(crate) fn finish(mut self) -> String {
        self.text.push_str("</svg>");
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::{Anchor, Svg, escape};

    #[test]
    fn what_would_break_a_page_is_escaped() {
        assert_eq!(escape("a<b> & \"c\" 'd'\u{1}\n"), "a&lt;b&gt; &amp; &quot;c&quot; &#39;d&#39; \n");
    }

    #[test]
    fn drawings_are_well_formed_whatever_is_drawn() {
        let mut svg = Svg::new(100.0, f64::NAN, "<title> & more", "\"quoted\"");
        svg.line("a\"b", (0.0, f64::INFINITY), (1.0, 2.0));
        svg.polyline("line", &[(0.123_456, 1.0), (f64::NAN, 2.0)]);
        svg.rect("bar", (0.0, 0.0), (-5.0, 3.0), "<5>");
        svg.text("tick", (1.0, 1.0), Anchor::End, "1 & 2");
        (0..8).for_each(|shape| svg.marker("dot", shape, (5.0, 5.0), "p50 < 1"));
        let text = svg.finish();
        let drawing = roxmltree::Document::parse(&text).unwrap();
        assert_eq!(drawing.root_element().attribute("aria-label"), Some("<title> & more. \"quoted\""));
        assert_eq!(drawing.descendants().filter(|node| node.has_tag_name("polygon")).count(), 6);
        assert!(text.contains("points=\"0.1,1 0,2\"") && !text.contains("NaN") && !text.contains("inf"), "{text}");
        assert!(text.contains("width=\"0\""), "a bar has no negative width");
    }
}
