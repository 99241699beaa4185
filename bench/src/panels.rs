//! Several series as SVG text: a small plot for each, all over one time, each with a scale of its
//! own from zero.

use std::fmt::Write as _;

use crate::plot::{STYLE, escaped};

/// One small plot.
pub struct Panel {
    /// Title, with the unit.
    pub title: String,
    /// Points, in ascending order of the time.
    pub points: Vec<(f64, f64)>,
}

/// The small plots of an image.
pub struct Panels {
    /// Title.
    pub title: String,
    /// Title of all horizontal axes.
    pub x_title: String,
    /// Time at which each plot has a vertical line.
    pub mark: f64,
    /// The plots.
    pub panels: Vec<Panel>,
}

const COLUMNS: usize = 3;
const WIDTH: f64 = 720.0;
/// Top of the first row of plots.
const TOP: f64 = 64.0;
/// Distance from a plot to the next one in its row, and in its column.
const STEP: (f64, f64) = (232.0, 120.0);
/// Size of the area of a plot.
const AREA: (f64, f64) = (196.0, 64.0);
/// Corner of that area from the corner of a plot.
const CORNER: (f64, f64) = (20.0, 26.0);
/// Text that is smaller than that of other plots.
const SMALL: &str = " .small { font-size: 11px }";

impl Panels {
    /// Returns the image as SVG text.
    pub fn svg(&self) -> String {
        let rows = self.panels.len().div_ceil(COLUMNS) as f64;
        let height = TOP + rows * STEP.1 + 16.0;
        let (title, x_title) = (escaped(&self.title), escaped(&self.x_title));
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
                width=\"{WIDTH}\" height=\"{height}\" role=\"img\" aria-label=\"{title}\">\n\
             <style>{STYLE}{SMALL}</style>\n\
             <text class=\"title\" x=\"16\" y=\"24\">{title}</text>\n\
             <text class=\"quiet\" x=\"16\" y=\"44\">{x_title}</text>\n"
        );
        for (number, panel) in self.panels.iter().enumerate() {
            let column = (number % COLUMNS) as f64;
            let row = (number / COLUMNS) as f64;
            let corner = (column * STEP.0 + CORNER.0, TOP + row * STEP.1 + CORNER.1);
            self.panel(&mut svg, panel, corner);
        }
        svg.push_str("</svg>\n");
        svg
    }

    /// Writes a plot whose area begins at a corner.
    fn panel(&self, svg: &mut String, panel: &Panel, (left, top): (f64, f64)) {
        let (right, bottom) = (left + AREA.0, top + AREA.1);
        let highest = panel.points.iter().map(|(_, value)| *value).fold(0.0, f64::max);
        let place = |point: &(f64, f64)| {
            let (x, y) = self.place(*point, highest);
            (left + x * AREA.0, bottom - y * AREA.1)
        };
        let _ = writeln!(
            svg,
            "<text class=\"small\" x=\"{left:.1}\" y=\"{:.1}\">{}</text>",
            top - 6.0,
            escaped(&panel.title)
        );
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{left:.1}\" x2=\"{right:.1}\" y1=\"{bottom:.1}\" \
                y2=\"{bottom:.1}\"/>"
        );
        let (mark, _) = place(&(self.mark, 0.0));
        let _ = writeln!(
            svg,
            "<line class=\"one\" x1=\"{mark:.1}\" x2=\"{mark:.1}\" y1=\"{top:.1}\" \
                y2=\"{bottom:.1}\"/>"
        );
        let places = panel.points.iter().map(place);
        let places: Vec<_> = places.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(svg, "<polyline class=\"line line0\" points=\"{}\"/>", places.join(" "));
        let _ = writeln!(
            svg,
            "<text class=\"quiet small\" x=\"{left:.1}\" y=\"{:.1}\">0 to {}</text>",
            bottom + 14.0,
            short(highest)
        );
        let (from, to) = self.times();
        let _ = writeln!(
            svg,
            "<text class=\"quiet small\" x=\"{right:.1}\" y=\"{:.1}\" \
                text-anchor=\"end\">{from:.0} to {to:.0}</text>",
            bottom + 14.0
        );
    }

    /// Returns the first and the last time of all plots.
    fn times(&self) -> (f64, f64) {
        let times = || self.panels.iter().flat_map(|panel| &panel.points).map(|(time, _)| *time);
        (times().fold(f64::INFINITY, f64::min), times().fold(f64::NEG_INFINITY, f64::max))
    }

    /// Returns the place of a point as shares of the width and the height of an area.
    fn place(&self, (time, value): (f64, f64), highest: f64) -> (f64, f64) {
        let (from, to) = self.times();
        let x = if to > from { ((time - from) / (to - from)).clamp(0.0, 1.0) } else { 0.0 };
        (x, if highest > 0.0 { value / highest } else { 0.0 })
    }
}

/// Formats a value: whole from a hundred on, with one decimal below.
pub fn short(value: f64) -> String {
    if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_series_fills_an_area_of_its_own() {
        let panel = |title: &str, value: f64| Panel {
            title: title.to_owned(),
            points: (0..10).map(|minute| (f64::from(minute), value * f64::from(minute))).collect(),
        };
        let panels = Panels {
            title: "a < b".to_owned(),
            x_title: "minutes".to_owned(),
            mark: 3.0,
            panels: vec![
                panel("small", 0.5),
                panel("large", 5_000.0),
                panel("nothing", 0.0),
                panel("second row", 1.0),
            ],
        };
        let svg = panels.svg();
        assert!(svg.contains("a &lt; b") && svg.matches("<polyline").count() == 4);
        assert!(svg.contains(">0 to 4.5<") && svg.contains(">0 to 45000<"));
        assert_eq!(panels.place((9.0, 4.5), 4.5), (1.0, 1.0));
        assert_eq!(panels.place((0.0, 0.0), 0.0), (0.0, 0.0));
        assert_eq!(panels.times(), (0.0, 9.0));
    }
}
