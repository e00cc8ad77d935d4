//! SVG drawings: lines over time and bars.

use crate::error::Result;
use plotters::prelude::*;

const WIDTH: u32 = 520;
/// Colours of the series by their place; the first is azekura's.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 103, 176),
    RGBColor(211, 84, 0),
    RGBColor(217, 154, 0),
    RGBColor(53, 163, 224),
    RGBColor(192, 90, 152),
    RGBColor(0, 143, 104),
    RGBColor(111, 111, 111),
    RGBColor(91, 63, 181),
];

/// One line with its name.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Lines from 0 over `x_label`; `None` if no series has two points.
pub(crate) fn lines(title: &str, x_label: &str, series: &[Series]) -> Option<String> {
    let numbers = |one: &Series| one.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
    let drawn: Vec<(&str, Vec<(f64, f64)>)> = series.iter().map(|one| (one.name.as_str(), numbers(one))).collect();
    let drawn: Vec<_> = drawn.into_iter().enumerate().filter(|(_, (_, points))| points.len() > 1).collect();
    let all = || drawn.iter().flat_map(|(_, (_, points))| points);
    let largest = |of: fn(&(f64, f64)) -> f64| all().map(of).fold(0.0, f64::max).max(1e-9);
    let (x_most, y_most) = (largest(|point| point.0), largest(|point| point.1) * 1.05);
    all().next()?;
    draw(320, |root| {
        let mut builder = ChartBuilder::on(root);
        builder.caption(title, ("sans-serif", 15)).margin(8).x_label_area_size(34).y_label_area_size(62);
        let mut chart = builder.build_cartesian_2d(0.0..x_most, 0.0..y_most)?;
        chart
            .configure_mesh()
            .x_desc(x_label)
            .y_label_formatter(&|number| short(*number))
            .light_line_style(WHITE)
            .draw()?;
        for (i, (name, points)) in &drawn {
            let colour = COLOURS[i % COLOURS.len()];
            let line = chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?;
            line.label(*name).legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
        }
        chart.configure_series_labels().border_style(BLACK.mix(0.3)).background_style(WHITE.mix(0.8)).draw()?;
        Ok(())
    })
}

/// One bar for each name and ratio, in another colour below 1; `None` if there is none.
pub(crate) fn bars(title: &str, values: &[(String, f64)]) -> Option<String> {
    let largest = values.iter().map(|(_, value)| *value).reduce(f64::max)?.max(1e-9);
    draw(60 + 22 * values.len() as u32, |root| {
        let mut builder = ChartBuilder::on(root);
        builder.caption(title, ("sans-serif", 15)).margin(8).x_label_area_size(34);
        let mut chart = builder.build_cartesian_2d(0.0..largest * 1.5, 0.0..values.len() as f64)?;
        chart.configure_mesh().disable_mesh().disable_y_axis().x_label_formatter(&|number| short(*number)).draw()?;
        for (i, (name, value)) in values.iter().enumerate() {
            let (colour, bottom) = (COLOURS[usize::from(*value < 1.0)], (values.len() - 1 - i) as f64);
            let text = format!("{name} {}", short(*value));
            chart.draw_series([Rectangle::new([(0.0, bottom + 0.2), (*value, bottom + 0.8)], colour.filled())])?;
            let place = (*value + largest * 0.02, bottom + 0.65);
            chart.draw_series([Text::new(text, place, ("sans-serif", 13))])?;
        }
        Ok(())
    })
}

type Canvas<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw(height: u32, act: impl FnOnce(&Canvas<'_>) -> Result<()>) -> Option<String> {
    let mut text = String::new();
    let root = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
    let drawn = root.fill(&WHITE).map_err(|error| error.to_string().into()).and_then(|()| act(&root));
    drawn.inspect_err(|error| eprintln!("a chart cannot be drawn: {error}")).ok()?;
    drop(root);
    Some(text)
}

/// Three significant digits with a unit of thousands: `942`, `1.23 k`, `12.3 M`.
fn short(mut number: f64) -> String {
    let mut unit = 0;
    while number.abs() >= 999.5 && unit < 3 {
        (number, unit) = (number / 1e3, unit + 1);
    }
    format!("{}{}", three_digits(number), ["", " k", " M", " G"][unit])
}

/// Three significant digits, never an exponent: `1.23`, `12.3`, `123`, `0.0123`.
pub(crate) fn three_digits(number: f64) -> String {
    let digits = if number == 0.0 { 2 } else { number.abs().log10().floor() as i32 };
    format!("{number:.decimals$}", decimals = (2 - digits).clamp(0, 6) as usize)
}

#[cfg(test)]
mod tests {
    use super::{Series, bars, lines, short};

    #[test]
    fn drawings_are_xml_with_a_mark_for_each_series() {
        let series = |name: &str, points: &[(f64, f64)]| Series { name: name.into(), points: points.to_vec() };
        let all = [
            series("azekura & co", &[(0.0, 1.0), (1.0, 5.0)]),
            series("fjall", &[(0.0, 2.0), (f64::NAN, 1.0), (1.0, 3.0)]),
        ];
        let drawing = lines("some <title>", "seconds", &all).unwrap();
        let parsed = roxmltree::Document::parse(&drawing).unwrap();
        assert!(parsed.descendants().filter(|node| node.has_tag_name("polyline")).count() >= 2);
        assert!(drawing.contains("fjall") && drawing.contains("seconds"));
        let drawing = bars("title", &[("azekura".to_owned(), 2.0)]).unwrap();
        assert!(roxmltree::Document::parse(&drawing).is_ok() && drawing.contains("azekura"));
        assert!(lines("empty", "s", &[series("one", &[(1.0, 1.0)])]).is_none() && bars("empty", &[]).is_none());
    }

    #[test]
    fn numbers_have_three_digits() {
        for (number, text) in [
            (0.0, "0"),
            (0.004_24, "0.00424"),
            (1.0, "1.00"),
            (12_345.0, "12.3 k"),
            (2.5e9, "2.50 G"),
            (-1500.0, "-1.50 k"),
        ] {
            assert_eq!(short(number), text);
        }
    }
}
