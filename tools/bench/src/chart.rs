//! The ratios with their spread, as a picture.

use crate::report::Ratio;

const ROW: f64 = 24.0;
const LEFT: f64 = 570.0;
const WIDTH: f64 = 400.0;
/// The scale is logarithmic.
const TICKS: [f64; 8] = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0];

/// A line from the ratio that one round in ten is below to the one that one round in ten is above,
/// a dot at the median, and a mark at the aim.
pub(crate) fn draw(ratios: &[Ratio]) -> String {
    let height = ROW * (ratios.len() + 3) as f64;
    let (width, bottom) = (LEFT + WIDTH + 40.0, height - 1.5 * ROW);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\"
    font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">
<title>Ratios of diesel_interlock to their references, with their spread</title>
<rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    for tick in TICKS {
        let (at, shade) = (x(tick), if tick == 1.0 { "#888" } else { "#ddd" });
        svg += &format!(
            "<path d=\"M{at:.1} {ROW} V{bottom:.1}\" stroke=\"{shade}\"/>
<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>\n",
            bottom + 16.0
        );
    }
    for (at, ratio) in ratios.iter().enumerate() {
        let (spread, middle) = (ratio.compared.ratio, ROW * (at as f64 + 1.5));
        let colour = if ratio.is_missed() { "#b33" } else { "#27c" };
        svg += &format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">
{}, {} clients</text>
<path d=\"M{:.1} {middle:.1} H{:.1}\" stroke=\"{colour}\" stroke-width=\"3\"/>
<circle cx=\"{:.1}\" cy=\"{middle:.1}\" r=\"5\" fill=\"{colour}\"/>\n",
            LEFT - 12.0,
            middle + 4.0,
            ratio.work.replace('`', ""),
            ratio.clients,
            x(spread.low),
            x(spread.high),
            x(spread.median),
        );
        if let Some(aim) = ratio.aim {
            svg += &format!(
                "<path d=\"M{:.1} {:.1} v16\" stroke=\"#222\" stroke-width=\"2\"/>\n",
                x(aim),
                middle - 8.0
            );
        }
    }
    svg + &format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">
ours / reference: median and spread; the black marks are the aims</text>
</svg>\n",
        LEFT + WIDTH / 2.0,
        height - 4.0
    )
}

fn x(ratio: f64) -> f64 {
    let [least, .., most] = TICKS;
    let share = (ratio.clamp(least, most) / least).ln() / (most / least).ln();
    LEFT + WIDTH * share
}
