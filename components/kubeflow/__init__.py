"""What a cluster and our tasks say to each other: KFP's contract, pods, and the tasks around the stages."""
