"""conv1d: y[b, t, o] = f(bias[o] + sum over j, c of x[b, c, t stride + j - padding] w[o, c, j]).

With channels last and the padding written out, the columns that an output sees are neighbours in
memory: row t of the unfolded input begins `stride channels` elements after row t - 1 and is
`kernel channels` long. So the product reads overlapping rows of one padded copy of x, and no
unfolded input is stored. An x that lies so already, or weights that lie [out, kernel, in], are not
copied.
"""
